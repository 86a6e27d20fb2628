"""Shardline under Docker Compose: images, health, users, secrets, a completion, and scaling out and
back under load."""

from __future__ import annotations

import time

import httpx
import pytest

from shardline.contract.api_key import bearer
from tests.compose.load import Load, ends, num_unfinished, once_each, push_on
from tests.compose.stack import MODEL, OWN, Stack, until

pytestmark = pytest.mark.timeout(3600)

APP_USER = "10001"
FIND_COMPILERS = "for name in cc c++ gcc g++ clang; do command -v $name; done; true"
LONG_TOKENS = 400
NUM_LONG = 16
SECRETS = {
    "gateway": ["database_url", "redis_url"],
    "relay": ["database_url", "redis_url"],
    "stage-0": ["database_url", "hop_secret_key", "redis_url"],
    "stage-1": ["hop_secret_key", "redis_url"],
    "flower": ["flower_auth", "redis_url"],
}
"""Stages behind the head never talk to Postgres."""
LIVE = "lease_until > now() AND ready_at IS NOT NULL"


def test_the_gateway_image_contains_neither_torch_nor_celery(stack: Stack) -> None:
    listed = stack.docker.run(
        "run", "--rm", "--network=none", stack.image("gateway"), "pip", "list", "--format=freeze"
    ).stdout
    names = {line.partition("==")[0].lower() for line in listed.splitlines()}
    assert {"fastapi", "shardline"} <= names
    assert not {"torch", "transformers", "celery", "numpy"} & names


@pytest.mark.parametrize("name", OWN)
def test_no_image_contains_a_compiler(stack: Stack, name: str) -> None:
    assert stack.docker.once(stack.image(name), "sh", "-c", FIND_COMPILERS) == ""


def test_the_stack_is_healthy_and_its_migration_has_ended(stack: Stack) -> None:
    states = {
        each["Service"]: (each["State"], each["Health"], each["ExitCode"])
        for each in stack.containers()
    }
    assert states.pop("migrate") == ("exited", "", 0)
    assert set(states) == {"redis", "postgres", "gateway", "relay", "stage-0", "stage-1", "flower"}
    assert set(states.values()) == {("running", "healthy", 0)}


@pytest.mark.parametrize("service", SECRETS)
def test_no_service_is_root_and_each_has_its_own_secrets_alone(stack: Stack, service: str) -> None:
    assert stack.inside(service, "id", "-u") == APP_USER
    names = SECRETS[service]
    assert stack.inside(service, "ls", "/run/secrets").split() == names
    for name in names:
        assert (
            stack.inside(service, "cat", f"/run/secrets/{name}")
            == (stack.secrets / name).read_text()
        )
    assert ("SHARDLINE_DATABASE_URL" in stack.inside(service, "env")) == ("database_url" in names)


def test_no_secret_is_in_a_containers_settings(stack: Stack) -> None:
    shown = stack.docker.run("inspect", *(each["Name"] for each in stack.containers())).stdout
    secrets = {path.name: path.read_text() for path in stack.secrets.iterdir()}
    assert {"database_url", "redis_url", "api_key", "hop_secret_key"} <= secrets.keys()
    assert [name for name, secret in secrets.items() if secret in shown] == []


def test_a_prompt_over_http_is_answered_through_both_stages(stack: Stack) -> None:
    (gateway,) = stack.gateways()
    request = {
        "model": MODEL,
        "prompt": "sort: 3, 1, 2 =",
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
    }
    url = f"{gateway}/v1/completions"
    assert httpx.post(url, json=request, timeout=60).status_code == 401
    answer = httpx.post(url, json=request, headers=bearer(stack.api_key), timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 16
    ((provenance,),) = stack.sql("SELECT provenance -> 'stages' -> 1 ->> 'device' FROM results")
    assert provenance == "cpu:1"


def test_flower_shows_every_worker_only_with_the_password(stack: Stack) -> None:
    with stack.flower() as flower:
        assert flower.get("/api/workers", auth=None).status_code == 401
        until(
            lambda: len(flower.get("/api/workers", params={"refresh": "1"}, timeout=30).json()) == 3
        )


def test_a_crashed_stage_is_restarted_and_running_jobs_succeed(stack: Stack) -> None:
    load = Load(stack.gateways(), stack.api_key, seed=5)
    for _ in range(NUM_LONG):
        load.push(LONG_TOKENS)
    until(lambda: stack.number("SELECT count(*) FROM jobs WHERE state = 'running'") > 0)
    stack.crash(*stack.names("stage-1"))
    until(lambda: num_unfinished(stack) == 0)
    assert ends(stack, load) == once_each(load)


def test_every_accepted_job_succeeds_once_while_the_stack_scales_out_and_back(stack: Stack) -> None:
    began_s = time.time()
    with Load(stack.gateways(), stack.api_key, seed=7) as load:
        push_on(load)
        stack.up(gateway=2, relay=2)
        load.gateways = stack.gateways()
        assert len(load.gateways) == 2
        push_on(load)
        stack.up(gateway=2, relay=2, stage_0=2, stage_1=2)
        # Nobody told the new stages to make a pipeline.
        until(lambda: stack.number(f"SELECT count(*) FROM pipelines WHERE {LIVE}") == 2)
        for _ in range(NUM_LONG):
            load.push(LONG_TOKENS)
        until(
            lambda: (
                stack.number("SELECT count(DISTINCT pipeline) FROM jobs WHERE state = 'running'")
                == 2
            )
        )
        stack.up(gateway=1, relay=1, stage_0=1, stage_1=1)
        push_on(load)
        load.gateways = stack.gateways()
        assert len(load.gateways) == 1
        push_on(load)
    until(lambda: num_unfinished(stack) == 0)
    print(f"{len(load.accepted)} jobs accepted while scaling")
    assert ends(stack, load) == once_each(load)
    assert stack.number(f"SELECT count(*) FROM pipelines WHERE {LIVE}") == 1
    assert stack.number("SELECT count(DISTINCT pipeline) FROM attempts") == 2
    # Each replica that was too many ended by itself within its grace period, as the migrations did.
    assert set(stack.exits(since_s=began_s)) == {"0"}
