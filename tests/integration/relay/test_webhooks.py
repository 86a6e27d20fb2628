"""Webhooks from a relay to a real server: each end is told of at least once, whatever dies, and an
endpoint that fails harms nobody but itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import openai
import pytest
from redis import Redis
from sqlalchemy import Engine, text
from typer.testing import CliRunner

from shardline.cli.commands import cli
from shardline.contract.keys import ENDED
from shardline.contract.tables import DONE_CHANNEL
from shardline.contract.webhooks.targets import WebhookReach
from shardline.store.connection.notify import listening
from shardline.store.webhooks import endpoints
from shardline.store.webhooks.endpoints import EndpointSecret, NewEndpoint
from tests.integration.relay.relay_stack import RelayStack, relay_stack
from tests.integration.relay.webhook_receiver import Webhook, WebhookReceiver, webhook_receiver
from tests.integration.rows import cell, change, end_one, running, success
from tests.polling import until

REACH = WebhookReach.parse("0.0.0.0/0")
TIMEOUT_S = 3
NUM_JOBS = 3
BREAK = "UPDATE webhook_endpoints SET secret = '?' WHERE id = :id"
OPEN = "SELECT count(*) FROM webhook_deliveries WHERE endpoint_id = :id AND due_at IS NOT NULL"
ERRORS = (
    "SELECT string_agg(DISTINCT coalesce(error, ''), '|') FROM webhook_deliveries"
    " WHERE endpoint_id = :id"
)
REASON = "SELECT disabled_reason FROM webhook_endpoints WHERE id = :id"


@pytest.fixture
def here(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[RelayStack]:
    with relay_stack(database_url, redis_url, tmp_path) as here:
        here.variables = {
            "SHARDLINE_WEBHOOK_NETWORKS": "127.0.0.1",
            "SHARDLINE_WEBHOOK_TIMEOUT_S": str(TIMEOUT_S),
            "SHARDLINE_WEBHOOK_MAX_ATTEMPTS": "2",
            "SHARDLINE_ENDED_STREAM_MAX": "1000",
            "SHARDLINE_TIME_SCALE": "0.05",
        }
        yield here


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with webhook_receiver() as receiver:
        yield receiver


def endpoint(engine: Engine, url: str, *names: str) -> EndpointSecret:
    new = NewEndpoint(url=url, name=url[-8:], event_types=names or ("job.*",))
    with engine.begin() as connection:
        return endpoints.create(connection, new, reach=REACH)


def ended_job(engine: Engine) -> UUID:
    """A job of now that has just succeeded."""
    claimed = running(engine)
    end_one(engine, success(claimed))
    return claimed.job_id


def ids_of(found: list[Webhook]) -> list[str]:
    return [one.headers["webhook-id"] for one in found]


def row(engine: Engine, made: EndpointSecret) -> dict[str, Any]:
    """The one delivery of an endpoint."""
    query = text("SELECT * FROM webhook_deliveries WHERE endpoint_id = :id")
    with engine.begin() as connection:
        return dict(connection.execute(query, {"id": made.endpoint.id}).mappings().one())


def test_a_relay_killed_between_send_and_record_sends_again_under_the_same_id(
    here: RelayStack, receiver: WebhookReceiver
) -> None:
    made = endpoint(here.engine, f"{receiver.url}/hook")
    relay = here.start_relay()

    def die_first() -> tuple[int, Mapping[str, str]]:
        receiver.answers.clear()
        relay.kill()
        return 200, {}

    receiver.answers["/hook"] = die_first
    job_id = ended_job(here.engine)
    receiver.wait_for("/hook", 1)
    here.start_relay()
    first, second = receiver.wait_for("/hook", 2)
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert first.body == second.body
    for one in (first, second):
        event = one.unwrap(made.secret)
        assert (event.type, event.data.id) == ("job.succeeded", str(job_id))
    until(lambda: row(here.engine, made)["state"] == "delivered")
    assert row(here.engine, made)["num_attempts"] == 2
    assert len(receiver.taken) == 2


def test_endpoints_that_fail_hang_or_move_harm_nobody_else_and_replays_arrive(
    here: RelayStack, receiver: WebhookReceiver
) -> None:
    hung = threading.Event()
    receiver.answers = {
        "/hangs": lambda: (200 if hung.wait() else 500, {}),
        "/fails": lambda: (500, {}),
        "/gone": lambda: (410, {}),
        "/moved": lambda: (302, {"Location": f"{receiver.url}/well"}),
    }
    paths = ("/well", "/hangs", "/fails", "/gone", "/moved")
    made = {path: endpoint(here.engine, f"{receiver.url}{path}") for path in paths}
    made["inside"] = endpoint(here.engine, "http://169.254.169.254/latest")
    # A secret that no door makes: a row by hand.
    made["broken"] = endpoint(here.engine, f"{receiver.url}/broken")
    change(here.engine, BREAK, id=made["broken"].endpoint.id)
    with listening(here.database_url, DONE_CHANNEL) as bell:
        here.start_relay()
        jobs = [ended_job(here.engine) for _ in range(NUM_JOBS)]
        words = ",".join(bell.hear(10) or ())
    assert str(jobs[0]) in words.split(",")
    until(lambda: here.redis.xlen(ENDED) == NUM_JOBS)
    assert {UUID(entry[b"id"].decode()) for _, entry in stream(here.redis)} == set(jobs)

    taken = receiver.wait_for("/well", NUM_JOBS)
    assert {one.unwrap(made["/well"].secret).data.id for one in taken} == set(map(str, jobs))
    with pytest.raises(openai.InvalidWebhookSignatureError):
        taken[0].unwrap(made["/gone"].secret)
    gone = made.pop("/gone")
    until(lambda: not any(cell(here.engine, OPEN, id=one.endpoint.id) for one in made.values()))
    hung.set()
    assert set(ids_of(receiver.at("/well"))) == set(ids_of(taken)), "no redirect was followed"
    told = {path: cell(here.engine, ERRORS, id=one.endpoint.id) for path, one in made.items()}
    assert told.pop("broken").startswith("it cannot be sent")
    assert receiver.at("/broken") == []
    assert told.pop("inside").startswith("its host is no public address")
    assert told == {
        "/well": "",
        "/hangs": f"it did not answer within {TIMEOUT_S} s",
        "/fails": "it answered 500",
        "/moved": "redirects are not followed",
    }
    assert "410" in cell(here.engine, REASON, id=gone.endpoint.id)
    tries = "SELECT min(num_attempts) FROM webhook_deliveries WHERE endpoint_id = :id"
    assert cell(here.engine, tries, id=made["/fails"].endpoint.id) >= 2

    failing = receiver.at("/fails")
    del receiver.answers["/fails"]
    name = f"we_{made['/fails'].endpoint.id}"
    assert command(here, "replay", name, "--json") == [{"replayed": NUM_JOBS}]
    replayed = receiver.wait_for("/fails", len(failing) + NUM_JOBS)[len(failing) :]
    assert set(ids_of(replayed)) == set(ids_of(failing))
    tried = command(here, "test", name, "--json", "-e", "batch.failed")
    assert tried[0]["status_code"] == 200
    event = receiver.at("/fails")[-1].unwrap(made["/fails"].secret)
    assert (event.type, event.data.id[:6]) == ("batch.failed", "batch_")


def stream(redis: Redis) -> list[tuple[bytes, dict[bytes, bytes]]]:
    entries: Any = redis.xrange(ENDED)
    return list(entries)


def command(here: RelayStack, *arguments: str) -> list[Any]:
    """Lines of JSON of `shardline webhooks`."""
    ran = CliRunner().invoke(
        cli, ["webhooks", *arguments], env={"SHARDLINE_DATABASE_URL": here.database_url}
    )
    assert ran.exit_code == 0, ran.output
    return [json.loads(line) for line in ran.stdout.splitlines()]
