"""The load's Celery app: what must follow a job is known, and what does not follow it once is
found."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
import redis

from services.standalone.servers import Valkey
from tests.chaos.judge.canvas import followed, wrong_numbers
from tests.chaos.load.canvas import DOOR, KINDS, LATE, by_canvas, dress, followers, kind_of
from tests.chaos.load.canvas_app import CALLS
from tests.chaos.load.canvas_worker import TRIED, CanvasWorker
from tests.chaos.load.journal import Asked, Journal
from tests.chaos.load.target import ResultBackend, Target
from tests.integration.relay.relay_stack import RelayStack, relay_stack
from tests.integration.rows import MODEL, claim, end, success
from tests.polling import until


def job_of(kind: str) -> UUID:
    """One that is part of such a canvas."""
    return next(job_id for _ in range(1000) if kind_of(job_id := uuid4(), {}) == kind)


def call(name: str, *, again: bool = False) -> dict[str, Any]:
    return {"name": name, "again": again}


@pytest.mark.parametrize(
    ("calls", "num_found"),
    [
        pytest.param([call("first"), call("second")], 0, id="once each"),
        pytest.param(
            [call("first"), call("second"), call("second", again=True)],
            0,
            id="given twice by the broker",
        ),
        pytest.param(
            [call("first", again=True), call("second")], 0, id="given again before it was noted"
        ),
        pytest.param([call("first")], 1, id="one is missing"),
        pytest.param([call("first"), call("second"), call("second")], 1, id="one was sent twice"),
        pytest.param(
            [call("first"), call("second"), call("errback")], 1, id="one that nobody asked for"
        ),
    ],
)
def test_calls_that_are_missing_or_too_many_are_found(
    calls: list[dict[str, Any]], num_found: int
) -> None:
    assert len(list(wrong_numbers(frozenset({"first", "second"}), calls))) == num_found


def test_what_was_perhaps_never_sent_may_be_missing() -> None:
    assert list(wrong_numbers(frozenset({"body"}), [], is_whole=False)) == []


def test_a_job_that_does_not_succeed_is_followed_by_its_errback_alone() -> None:
    assert followers("chain", "succeeded") == {"next"}
    assert followers(LATE, "expired") == {"errback"}
    dresses = [dress(random.Random(seed)) for seed in range(100)]
    assert {kind_of(uuid4(), one.fields) == LATE for one in dresses} == {True, False}
    assert all(
        (one.ends == {"expired"}) == (kind_of(uuid4(), one.fields) == LATE) for one in dresses
    )


@pytest.fixture
def results(tmp_path: Path) -> Iterator[ResultBackend]:
    """A Redis of its own."""
    valkey = Valkey(tmp_path / "results")
    valkey.start()
    yield ResultBackend(url=valkey.url, home=tmp_path / "results")
    valkey.kill()


@pytest.fixture
def relays(
    database_url: str, redis_url: str, results: ResultBackend, tmp_path: Path
) -> Iterator[RelayStack]:
    """A relay that stores results there."""
    with relay_stack(database_url, redis_url, tmp_path) as relays:
        relays.variables["SHARDLINE_RESULT_BACKEND"] = results.url
        relays.start_relay()
        yield relays


@contextmanager
def working(relays: RelayStack, results: ResultBackend) -> Iterator[CanvasWorker]:
    """The other team's worker runs."""
    drained = Event()
    worker = CanvasWorker(
        broker_url=relays.redis_url, backend_url=results.url, home=results.home, drained=drained
    )
    thread = Thread(target=worker.run)
    thread.start()
    try:
        yield worker
    finally:
        drained.set()
        thread.join()


def asked(relays: RelayStack, results: ResultBackend, kind: str, num_sends: int = 1) -> Target:
    """A target whose only job is part of such a canvas, and succeeds."""
    job_id = job_of(kind)
    journal = Journal()
    journal.ask(Asked(id=job_id, number=0, door=DOOR))
    for _ in range(num_sends):
        by_canvas(relays.redis_url, results.url)(job_id, {"model": MODEL, "prompt": "one"})
    (sent,) = relays.take_messages(1)
    (claimed,) = claim(relays.engine, [UUID(sent)])
    end(relays.engine, success(claimed))
    urls = {"database_url": relays.database_url, "redis_url": relays.redis_url}
    return cast(Target, SimpleNamespace(journal=journal, results=results, **urls))


@pytest.mark.parametrize("kind", KINDS)
def test_each_canvas_calls_what_must_follow_it(
    relays: RelayStack, results: ResultBackend, kind: str
) -> None:
    with working(relays, results) as worker:
        target = asked(relays, results, kind, num_sends=2)
        found = followed(target, worker.disturbed_s)
    assert (found.findings, found.num_jobs, found.num_excused) == ([], 1, 0)


def test_a_lost_or_changed_call_and_a_lost_result_are_found(
    relays: RelayStack, results: ResultBackend
) -> None:
    with working(relays, results) as worker:
        target = asked(relays, results, "link")
        assert followed(target, worker.disturbed_s).findings == []
    with redis.Redis.from_url(results.url) as client:
        (noted,) = cast(list[bytes], client.lrange(CALLS, 0, -1))
        client.delete(CALLS)
        assert len(followed(target, [], patience_s=0).findings) == 1
        assert followed(target, [time.time()], patience_s=0).findings == []
        client.rpush(CALLS, noted.replace(b'"token_ids": [7', b'"token_ids": [9'))
        assert len(followed(target, [], patience_s=0).findings) == 1
        client.flushall()
        assert len(followed(target, [time.time()], patience_s=0).findings) == 1


def test_a_broker_that_forgets_or_cuts_is_noticed(redis_url: str, results: ResultBackend) -> None:
    drained = Event()
    worker = CanvasWorker(
        broker_url=redis_url, backend_url=results.url, home=results.home, drained=drained
    )
    thread = Thread(target=worker.run)
    thread.start()
    try:
        with redis.Redis.from_url(redis_url) as client:
            until(lambda: client.exists(TRIED))
            client.flushall()
            until(lambda: len(worker.disturbed_s) == 1)
            client.execute_command("CLIENT", "KILL", "TYPE", "normal")
            until(lambda: len(worker.disturbed_s) > 1)
    finally:
        drained.set()
        thread.join()
