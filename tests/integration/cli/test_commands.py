"""The command line against real Postgres and Valkey, with a head that echoes prompts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest
from sqlalchemy import text
from typer.testing import CliRunner, Result

from shardline.cli.commands import cli
from shardline.contract.job import JobState
from shardline.store import fleets, pipelines
from shardline.store.connection.database import transaction
from shardline.store.fleets import WorkerOffer
from shardline.store.models import register_adapters
from shardline.store.statistics.costs import put_fixed
from shardline_costs import Link
from shardline_server.store import crashes
from tests.repository import REPOSITORY
from tests.tiny_head import NUM_CACHED, TinyHead, energy_j, tiny_head
from tests.unit.fleet.planner.fleets import device, model

PROMPT = "sum: 1 + 2 ="
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
SHARED = REPOSITORY / "shared"
Shardline = Callable[..., Result]


@pytest.fixture
def servers(database_url: str, redis_url: str) -> dict[str, str]:
    return {"SHARDLINE_DATABASE_URL": database_url, "SHARDLINE_REDIS_URL": redis_url}


@pytest.fixture
def shardline(servers: dict[str, str]) -> Shardline:
    def run(*arguments: object, stdin: str | None = None) -> Result:
        return CliRunner().invoke(cli, [str(each) for each in arguments], env=servers, input=stdin)

    return run


@pytest.fixture
def head(database_url: str, redis_url: str) -> Iterator[TinyHead]:
    with tiny_head(database_url, redis_url) as head:
        yield head


def submitted(shardline: Shardline, *options: str) -> UUID:
    ran = shardline("submit", PROMPT, "--model", "clerk", *options)
    assert ran.exit_code == 0, ran.output
    return UUID(ran.stdout.strip())


def test_a_submitted_policy_is_shown_with_its_job(shardline: Shardline, head: TinyHead) -> None:
    waits = ("--backoff-s", "90", "--max-backoff-s", "900")
    options = ("--max-attempts", "4", *waits, "--retry-on", "crashed", "--retry-on", "engine")
    job_id = submitted(shardline, *options)
    head.claim()
    with head.database.begin() as connection:
        assert crashes.requeue_failed_held(connection, [(job_id, 1)]) == {job_id: True}
    shown = shardline("get", job_id).stdout
    assert "4 attempts after crashed, engine, waits 90 to 900 s" in shown
    assert "next attempt" in shown
    wrong = shardline(
        "submit", PROMPT, "--model", "clerk", "--max-attempts", "3", "--retry-on", "x"
    )
    assert wrong.exit_code != 0
    assert "Send some of crashed, engine" in wrong.output


def test_submit_and_wait_prints_the_completion_alone(shardline: Shardline, head: TinyHead) -> None:
    with head.serving():
        ran = shardline("submit", PROMPT, "--temperature", "0", "--seed", 7, "--wait")
    assert (ran.exit_code, ran.stdout) == (0, f"{PROMPT}\n")
    assert UUID(ran.stderr.removeprefix("job ").strip())


def test_a_prompt_from_standard_input_is_streamed_once(
    shardline: Shardline, head: TinyHead
) -> None:
    with head.serving():
        ran = shardline("submit", "--stream", stdin=f"{PROMPT}\n")
    assert (ran.exit_code, ran.stdout) == (0, f"{PROMPT}\n")


def test_every_line_is_a_document_when_json_is_followed(
    shardline: Shardline, head: TinyHead
) -> None:
    job_id = submitted(shardline, "--max-tokens", "4", "-f", 'metadata={"order":7}')
    head.finish(head.claim())
    deltas = [
        json.loads(line) for line in shardline("stream", job_id, "--json").stdout.splitlines()
    ]
    assert deltas[-1]["state"] == "succeeded"
    (job,) = [json.loads(line) for line in shardline("get", job_id, "--json").stdout.splitlines()]
    assert (job["state"], job["metadata"]) == ("succeeded", {"order": 7})
    assert [token_id for delta in deltas for token_id in delta.get("ids", ())] == job["result"][
        "token_ids"
    ]


def test_listed_jobs_show_ids_and_states(shardline: Shardline, head: TinyHead) -> None:
    first = submitted(shardline)
    second = submitted(shardline)
    shown = shardline("list", "--model", "clerk").stdout
    assert shown.index(str(second)) < shown.index(str(first))
    assert shown.count("queued") == 2
    assert PROMPT in shown
    head.finish(head.claim_all()[0])
    assert str(second) not in shardline("list", "--state", "succeeded").stdout
    assert len(shardline("list", "--limit", 1, "--json").stdout.splitlines()) == 1


def test_an_ended_job_shows_result_and_provenance(shardline: Shardline, head: TinyHead) -> None:
    job_id = submitted(shardline)
    head.finish(head.claim())
    shown = shardline("get", job_id).stdout
    assert [
        word
        for word in (
            "succeeded",
            "stop",
            "running 0.100 s",
            f"({NUM_CACHED} cached)",
            f"\n{PROMPT}\n",
        )
        if word not in shown
    ] == []


def test_waiting_for_a_cancelled_job_ends_with_status_1(shardline: Shardline) -> None:
    job_id = submitted(shardline)
    assert shardline("cancel", job_id).stdout == f"{job_id} cancelled\n"
    ran = shardline("wait", job_id)
    assert (ran.exit_code, ran.stdout) == (1, "")
    assert "was cancelled" in ran.stderr


def test_following_a_failed_job_tells_the_reason(shardline: Shardline, head: TinyHead) -> None:
    job_id = submitted(shardline)
    head.end(head.claim(), JobState.FAILED)
    for command in ("wait", "stream"):
        ran = shardline(command, job_id)
        assert (ran.exit_code, "it broke the engine" in ran.stderr) == (1, True)
    assert "it broke the engine" in shardline("get", job_id).stdout


def test_the_status_tells_no_such_job_from_no_time(shardline: Shardline) -> None:
    assert [
        shardline(command, uuid4()).exit_code for command in ("get", "wait", "stream", "cancel")
    ] == [3] * 4
    assert shardline("wait", submitted(shardline), "--timeout-s", 0.05).exit_code == 124


def test_a_pipeline_shows_its_stages_layers_and_devices(
    shardline: Shardline, head: TinyHead
) -> None:
    stages = [
        {"worker": "p.0@h", "layers": [0, 4], "device": "cpu:0"},
        {"worker": "p.1@h", "layers": [4, 8], "device": "cpu:1"},
    ]
    with head.database.begin() as connection:
        epoch = pipelines.take_epoch(
            connection, "p", model="clerk", fingerprint="f1", head="p.0@h", lease_s=60
        )
        assert epoch == 1
        pipelines.ready(connection, "p", epoch, seats=8, stages=stages, exact=True, kv_tokens=4096)
    shown = shardline("pipelines").stdout
    assert [
        part for part in ("0-3", "4-7", "cpu:0", "cpu:1", "p.1@h", "ready") if part not in shown
    ] == []
    documents = [json.loads(line) for line in shardline("pipelines", "--json").stdout.splitlines()]
    assert [document["stages"] for document in documents if document["id"] == "p"] == [stages]


def test_models_show_their_limits_and_adapters(shardline: Shardline, head: TinyHead) -> None:
    with head.database.begin() as connection:
        register_adapters(connection, "clerk", {"polite": "f2"})
    assert {"clerk", "polite"} <= set(shardline("models").stdout.split())
    (model,) = [json.loads(line) for line in shardline("models", "--json").stdout.splitlines()]
    assert (model["name"], model["ready"], model["context_length"]) == (
        "clerk",
        True,
        head.tokens.context_length,
    )
    assert model["adapters"] == {"polite": "f2"}


def test_a_model_is_asked_for_where_none_is_registered(shardline: Shardline) -> None:
    ran = shardline("submit", PROMPT)
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert "--model" in ran.stderr


def test_a_database_without_tables_names_the_remedy(empty_database_url: str) -> None:
    ran = CliRunner().invoke(cli, ["list"], env={"SHARDLINE_DATABASE_URL": empty_database_url})
    assert (ran.exit_code, "alembic upgrade head" in ran.stderr) == (4, True)


def test_the_command_speaks_through_its_streams(servers: dict[str, str]) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "shardline.cli", "submit", PROMPT, "--model", "clerk", "--json"],
        env={**os.environ, **servers, "PYTHONPATH": str(SHARED)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert UUID(json.loads(ran.stdout)["id"])
    assert ran.stderr == ""


def test_scale_says_how_many_workers_the_load_of_a_fleet_needs(
    shardline: Shardline, head: TinyHead
) -> None:
    offer = WorkerOffer(
        shapes=msgspec.to_builtins(model()),
        profile=msgspec.to_builtins(device("cores:0", slower=10)),
    )
    with head.database.begin() as connection:
        for name in ("one", "other"):
            fleets.join(connection, name, {"clerk": offer}, lease_s=60)
    nothing_asked = shardline("scale", "--dry-run")
    with head.serving():
        assert shardline("submit", PROMPT, "--model", "clerk", "--wait").exit_code == 0

    def asked(*options: object) -> dict[str, Any]:
        ran = shardline("scale", "--dry-run", "--json", *options)
        assert ran.exit_code == 0, ran.output
        answer: dict[str, Any] = json.loads(ran.stdout)
        return answer

    few = asked()
    many = asked("--rate", 40, "--output", 100)
    assert (few["here"], few["needed"], few["load"]["queued"]) == (2, 1, 0)
    assert few["load"]["jobs_per_s"] == pytest.approx(1 / 900)
    assert few["load"]["prompt"] > 1
    assert many["needed"] > 2
    assert [size["used"] <= 0.7 for size in many["sizes"]] == [
        size["workers"] >= many["needed"] for size in many["sizes"]
    ]
    assert (
        f"needed: {many['needed']} workers"
        in shardline("scale", "--dry-run", "--rate", 40, "--output", 100).stdout
    )
    assert nothing_asked.exit_code == shardline("scale").exit_code == 2
    assert "--window-s" in nothing_asked.stderr


def test_devices_shows_what_workers_have_measured(shardline: Shardline, head: TinyHead) -> None:
    links = {"two": Link(latency_s=0.02, bytes_per_s=5e8)}
    one = device("cores:0", host="tower", machine="one", links=links)
    other = device("cores:1", slower=10, host="attic", machine="two")
    with head.database.begin() as connection:
        for name, profile in (("first", one), ("second", other)):
            fleets.join(
                connection,
                name,
                {"clerk": WorkerOffer(shapes=model(), profile=profile)},
                lease_s=60,
            )
        fleets.store_plan(
            connection, "clerk", version=0, split=[(0, 12)], stages={"first": 0}, tokens_per_s=None
        )

    shown = shardline("devices").stdout
    lines = shardline("devices", "--json").stdout.splitlines()

    assert "tower to attic: 20.00 ms, 500 MB/s" in shown
    assert [line.split()[0] for line in shown.splitlines()[1:3]] == ["first", "second"]
    fast, slow = (json.loads(line) for line in lines)
    assert (fast["layers"], slow["layers"]) == ([0, 12], None)
    assert fast["rates"]["weight_bytes_per_s"] == pytest.approx(
        10 * slow["rates"]["weight_bytes_per_s"]
    )


def test_devices_of_no_fleet_says_how_one_begins(shardline: Shardline, head: TinyHead) -> None:
    assert "SHARDLINE_LAYERS=planned" in shardline("devices").stdout


def test_costs_are_shown_by_what_was_asked_for(
    shardline: Shardline, head: TinyHead, servers: dict[str, str]
) -> None:
    with transaction(servers["SHARDLINE_DATABASE_URL"]) as connection:
        put_fixed(connection, "price", 0.5)
        put_fixed(connection, "carbon", 100.0)
    submitted(shardline)
    head.finish(head.claim())
    submitted(shardline)
    head.claim()

    (row,) = [
        json.loads(line)
        for line in shardline("cost", "--by", "tenant", "--json").stdout.splitlines()
    ]
    took_j = energy_j(row["prompt_tokens"], row["completion_tokens"])
    kwh = took_j / 3.6e6
    assert (row["tenant"], row["model"], row["num_jobs"], row["num_unknown"]) == (
        "default",
        None,
        2,
        1,
    )
    assert (row["kwh"], row["cost"], row["carbon_g"]) == pytest.approx((kwh, 0.5 * kwh, 100 * kwh))
    shown = shardline("cost", "--days", 1, "--by", "model", "--by", "day")
    header, line = shown.stdout.splitlines()
    assert line.split()[1:4] == ["clerk", "all", "2"]
    assert line.split()[-1] == "table"
    per_token = dict(zip(header.split(), line.split(), strict=True))["J/out"]
    assert float(per_token) == pytest.approx(took_j / row["completion_tokens"], rel=1e-3)
    assert "1 attempts count as nothing" in shown.stderr


def test_names_and_texts_are_shown_as_they_are(shardline: Shardline, head: TinyHead) -> None:
    name = "[/red]\x1b[2J"
    with head.database.begin() as connection:
        insert = text("INSERT INTO jobs (model, prompt) VALUES (:name, :prompt)")
        connection.execute(insert, {"name": name, "prompt": "[bold]\x1b]0;title\x07"})
    shown = shardline("list")
    assert shown.exit_code == 0, shown.output
    assert "[/red]\\x1b[2J" in shown.stdout
    assert "[bold]\\x1b]0;title" in shown.stdout
    assert "\x1b" not in shown.stdout


def test_a_prompt_for_a_chat_model_is_a_message_unless_it_is_called_a_text(
    shardline: Shardline, head: TinyHead
) -> None:
    with head.database.begin() as connection:
        connection.execute(text("UPDATE models SET chat_template = :t"), {"t": TEMPLATE})
    ids = [
        submitted(shardline, *options) for options in ((), ("--text",), ("--system", "Be brief."))
    ]
    with head.database.connect() as connection:
        stored = connection.execute(text("SELECT id, messages, prompt FROM jobs")).all()
    messages = {row.id: row.messages for row in stored}
    assert messages[ids[0]] == [{"role": "user", "content": PROMPT}]
    assert messages[ids[1]] is None
    assert [each["role"] for each in messages[ids[2]]] == ["system", "user"]


def test_the_stack_of_the_folder_or_one_above_it_is_found(
    servers: dict[str, str], head: TinyHead, tmp_path: Path
) -> None:
    urls = {
        "database": servers["SHARDLINE_DATABASE_URL"],
        "redis": servers["SHARDLINE_REDIS_URL"],
        "gateway": "http://127.0.0.1:1",
    }
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    (tmp_path / ".local").mkdir()
    (tmp_path / ".local" / "up.json").write_text(json.dumps({"urls": urls, "api_key": "k"}))
    environment = {name: value for name, value in os.environ.items() if "SHARDLINE" not in name}

    def models(**settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "shardline.cli", "models", "--json"],
            env={**environment, "PYTHONPATH": str(SHARED), **settings},
            cwd=below,
            capture_output=True,
            text=True,
            check=False,
        )

    assert json.loads(models().stdout)["name"] == "clerk"
    assert json.loads(models(SHARDLINE_HOME=str(tmp_path / ".local")).stdout)["name"] == "clerk"
    elsewhere = models(SHARDLINE_DATABASE_URL="postgresql://shardline@127.0.0.1:1/shardline")
    assert (elsewhere.returncode, elsewhere.stdout) == (4, ""), "what the environment names is used"
