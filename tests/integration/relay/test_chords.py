"""A chord whose last part is a job of ours, when its broker is deaf or its relay dies: the body
comes once. A foreign app on real servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from celery import chord

from services.standalone.servers import Valkey
from shardline.contract.job import JobState
from shardline.contract.keys import RELAY_UNACKED
from shardline_server.failpoints import Point
from tests.chaos.faults.arming import arm
from tests.integration.relay.foreign_stack import ForeignStack, foreign_stack
from tests.integration.relay.relay_stack import PATIENCE_S
from tests.integration.relay.test_canvas import TEXT, foreign, submit
from tests.integration.rows import cell
from tests.polling import until


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Valkey]:
    """A Redis without results: those stay in reach."""
    server = Valkey(tmp_path / "broker")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def here(
    database_url: str, redis_url: str, broker: Valkey, tmp_path: Path
) -> Iterator[ForeignStack]:
    """With a relay; broker and result backend are two servers."""
    (tmp_path / "failpoints").mkdir()
    with foreign_stack(
        database_url,
        broker.url,
        tmp_path,
        backend=redis_url,
        foreign_backend=redis_url,
        SHARDLINE_FAILPOINTS=str(tmp_path / "failpoints"),
    ) as here:
        here.relays.start_relay()
        yield here


def send_chord(here: ForeignStack) -> tuple[Any, list[UUID]]:
    """Returns the body's result, and the jobs of the parts, which a head has."""
    body = foreign(here.app, "take").on_error(foreign(here.app, "blame"))
    # One try of a publish: how often Celery itself tries again does not matter.
    body.set(retry=False)
    result = chord([submit(here.app, "one"), submit(here.app, "two")])(body)
    return result, [UUID(sent) for sent in here.relays.take_messages(2)]


def end_while_deaf(here: ForeignStack, broker: Valkey, jobs: dict[UUID, JobState]) -> None:
    """All jobs end while the broker does not answer, until a relay has failed to send the body or
    has nothing more to do."""
    broker.pause()
    try:
        for job_id, state in jobs.items():
            here.finish(job_id, state)
        query = """
            SELECT count(*) FILTER (WHERE num_failures > 0) > 0 OR bool_and(settled_at IS NOT NULL)
            FROM celery_tasks
        """
        until(lambda: cell(here.relays.engine, query), timeout_s=PATIENCE_S)
    finally:
        broker.resume()


def test_the_body_of_a_chord_is_sent_once_after_the_broker_was_deaf(
    here: ForeignStack, broker: Valkey
) -> None:
    result, jobs = send_chord(here)
    end_while_deaf(here, broker, dict.fromkeys(jobs, JobState.SUCCEEDED))
    assert [one["text"] for one in result.get(timeout=PATIENCE_S)] == [TEXT, TEXT]
    here.wait_until_settled()
    assert [name for name, _ in here.calls()] == ["take"]


def test_errbacks_of_a_chord_are_sent_once_after_the_broker_was_deaf(
    here: ForeignStack, broker: Valkey
) -> None:
    result, (first, second) = send_chord(here)
    end_while_deaf(here, broker, {first: JobState.SUCCEEDED, second: JobState.FAILED})
    with pytest.raises(Exception, match="it broke"):
        result.get(timeout=PATIENCE_S)
    here.wait_until_settled()
    assert here.wait_for_calls(1) == [["blame", result.id]]


def test_a_relay_killed_between_joining_a_chord_and_sending_it_loses_no_body(
    here: ForeignStack, tmp_path: Path
) -> None:
    result, jobs = send_chord(here)
    arming = arm(tmp_path / "failpoints", Point.CHORD_JOINED)
    for job_id in jobs:
        here.finish(job_id)
    arming.wait(timeout_s=PATIENCE_S)
    # Before the claim of the dead relay has run out.
    here.end_leases()
    here.relays.start_relay()
    assert [one["text"] for one in result.get(timeout=PATIENCE_S)] == [TEXT, TEXT]
    here.wait_until_settled()
    assert [name for name, _ in here.calls()] == ["take"]


def test_a_job_as_the_body_of_a_chord_is_refused_without_a_redis_backend(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    backend = database_url.replace("postgresql://", "db+postgresql+psycopg://")
    with foreign_stack(
        database_url, redis_url, tmp_path, backend=backend, foreign_backend=backend
    ) as here:
        here.relays.start_relay()
        parts = [foreign(here.app, "say", "one"), foreign(here.app, "say", "two")]
        body = chord(parts)(submit(here.app))
        with pytest.raises(Exception, match="a chord whose body is a job needs a Redis backend"):
            body.get(timeout=PATIENCE_S)
        until(lambda: here.relays.redis.llen("shardline.intake") == 0)
        assert here.relays.redis.hlen(RELAY_UNACKED) == 0
