"""Suspects on real servers: claimed alone whoever interferes, and soon whatever arrives, counted in
heartbeats."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker
from sqlalchemy import Connection
from sqlalchemy import Engine as Database
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from services.stage.adapters.peft import AdapterFolder
from services.stage.app import make_app
from services.stage.celery.delivery import Delivery
from services.stage.celery.hub_calls import HubCalls
from services.stage.engine.executor import Executor
from services.stage.hop.wakeup import Wakeup
from services.stage.jobs.attempt_spans import AttemptSpans
from services.stage.jobs.claimer import Claimer
from services.stage.jobs.engine_requests import EngineRequests
from services.stage.jobs.identity import Identity
from services.stage.jobs.live_jobs import LiveJobs
from services.stage.jobs.quarantine import ClaimContext, Seats
from services.stage.settings import StageSettings
from shardline.base.config import Times
from shardline.contract.job import FinishReason, JobState
from shardline.contract.queues import GENERATE_TASK
from shardline.store import jobs
from shardline_scheduler.sequence import Key, Request, TokenSink
from shardline_server.store import claims, crashes, leases
from shardline_server.store.claims import ClaimedJob
from shardline_server.tokenize import Tokens
from shardline_server.tracing import OFF
from tests.integration.rows import MODEL, cell, change, request, state, submit
from tests.integration.stage.jobs.lone_head import LoneHead, open_lone_head
from tests.polling import until

TIMES = Times().scaled(0.5)
SEATS = 8
LONG_PROMPT = 3_000
"""Tokens of each arrival: some fifty steps until its first token, and many arrivals share them."""

HEARTBEATS = 3
"""Two, and one more for a lease manager that a busy machine kept waiting."""

QUEUE = "suspects"


def crash(database: Database, job_id: UUID) -> None:
    """An engine died under it, and a relay has queued it again."""
    change(database, "UPDATE jobs SET crashes = 1 WHERE id = :id", id=job_id)


# Choice and claim are two transactions


@dataclass(slots=True, kw_only=True)
class Head:
    """One head's claimer, its turns called by the test. It holds what it claimed."""

    claimer: Claimer
    jobs: LiveJobs
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    dropped: list[str] = field(default_factory=list)

    def offer(self, *job_ids: UUID) -> None:
        """One delivery of each."""
        for job_id in job_ids:
            self.claimer.offer(
                Delivery(
                    number=next(self.numbers),
                    job_id=str(job_id),
                    hub=HUB,
                    on_accepted=lambda *_: None,
                    on_ended=lambda _: None,
                    forget=lambda _: True,
                )
            )

    def turn(self) -> list[UUID]:
        """What it claims now, with nothing alive."""
        context = ClaimContext(live=(), now_s=0.0, heartbeat_s=1.0, num_steps=0, is_moving=True)
        held = set(self.jobs)
        self.claimer.claim_waiting(IDENTITY, context)
        return [job.job_id for job in self.jobs if job not in held]


class IdleEngine:
    """Takes jobs and makes no step."""

    epoch, num_steps = 1, 0
    is_fenced = False

    def extend_lease(self, until_s: float) -> None:
        """It has nothing to stop."""

    def add(self, request: Request, sink: TokenSink) -> None:
        """Kept by the head's live jobs alone."""

    def begin(self, key: Key) -> None:
        """Not yet."""

    def end(self, key: Key, reason: FinishReason) -> None:
        """Never."""

    def release(self, key: Key) -> None:
        """Never: no token is made."""

    def forget(self, key: Key) -> None:
        """It knows none."""


HUB = HubCalls(Wakeup())
TOKENIZER = Tokenizer(WordLevel({"<0>": 0}, unk_token="<0>"))
IDENTITY = Identity(
    worker="h",
    pipeline="p",
    epoch=1,
    model=MODEL,
    fingerprint="w",
    exactness="x",
    exact=True,
    kv_tokens=4_096,
    revision=None,
    stages=(),
    software={},
)


@pytest.fixture
def make_head(database: Database) -> Callable[[], Head]:
    def make() -> Head:
        engine = IdleEngine()
        jobs = LiveJobs(engine)
        claimer = Claimer(
            database=database,
            engine=engine,
            requests=EngineRequests(
                tokens=Tokens(
                    model="m",
                    tokenizer_json=Tokenizer(WordLevel({"<0>": 0}, unk_token="<0>")).to_str(),
                    chat_template=None,
                    special_tokens={},
                    context_length=4096,
                    vocab_size=4096,
                    eos_ids=(2,),
                ),
                adapters=AdapterFolder(None, {}, Path()),
                spans=AttemptSpans(OFF),
            ),
            jobs=jobs,
            seats=Seats(num_any=SEATS, num_interactive=0),
            times=TIMES,
        )
        return Head(claimer=claimer, jobs=jobs)

    return make


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """What the test does once, after a head has chosen and before it claims."""

    def arrange(happening: Callable[[], None]) -> None:
        real = crashes.quarantined

        def quarantined(connection: Connection, ids: Collection[str]) -> list[UUID]:
            found = real(connection, ids)
            monkeypatch.setattr(crashes, "quarantined", real)
            happening()
            return found

        monkeypatch.setattr(crashes, "quarantined", quarantined)

    return arrange


def test_a_job_that_becomes_a_suspect_before_its_claim_is_claimed_alone(
    database: Database, make_head: Callable[[], Head], between: Callable[[Callable[[], None]], None]
) -> None:
    poison, innocent = submit(database, 2)
    head = make_head()
    head.offer(poison, innocent)
    between(lambda: crash(database, poison))

    assert head.turn() == [innocent]

    assert state(database, poison) is JobState.QUEUED
    head.offer(poison)
    assert head.turn() == [poison]


def test_two_heads_that_chose_one_suspect_lose_no_job(
    database: Database, make_head: Callable[[], Head], between: Callable[[Callable[[], None]], None]
) -> None:
    suspect, other = submit(database, 2)
    crash(database, suspect)
    first = make_head()
    second = make_head()
    first.offer(suspect)
    second.offer(suspect, other)
    taken: list[UUID] = []
    between(lambda: taken.extend(first.turn()))

    assert second.turn() == []

    assert taken == [suspect]
    assert cell(database, "SELECT fence FROM jobs WHERE id = :id", id=suspect) == 1
    second.claimer.again()
    assert second.turn() == [other], "it waited, and its delivery was kept"


def test_a_suspect_cancelled_before_its_claim_makes_way_for_others(
    database: Database, make_head: Callable[[], Head], between: Callable[[Callable[[], None]], None]
) -> None:
    suspect, other = submit(database, 2)
    crash(database, suspect)
    head = make_head()
    head.offer(suspect, other)

    def cancel() -> None:
        with database.begin() as connection:
            jobs.request_cancel(connection, [suspect])

    between(cancel)

    assert head.turn() == []
    assert state(database, suspect) is JobState.CANCELLED
    head.claimer.again()
    assert head.turn() == [other]


def test_a_suspect_proven_by_another_head_is_still_claimed_alone(
    database: Database, make_head: Callable[[], Head], between: Callable[[Callable[[], None]], None]
) -> None:
    suspect, other = submit(database, 2)
    crash(database, suspect)
    head = make_head()
    head.offer(suspect, other)
    between(lambda: change(database, "UPDATE jobs SET crashes = 0"))

    assert head.turn() == [suspect]
    head.claimer.again()
    assert head.turn() == [other]


# A whole head: Celery's worker, its pool, lease manager and engine
# ---------------------------------------------------


@dataclass(slots=True)
class Rounds:
    """What the lease manager did, in its order: the ids of each claim, None for each heartbeat
    after a step."""

    seen: list[tuple[UUID, ...] | None] = field(default_factory=list)
    num_steps: Callable[[], int] = lambda: 0
    last_step: int = -1

    def beat(self) -> None:
        """A hung engine's beats do not count: a suspect is not drawn in."""
        if self.num_steps() != self.last_step:
            self.last_step = self.num_steps()
            self.seen.append(None)

    def place(self, job_id: UUID) -> int | None:
        """Where it was claimed."""
        return next((place for place, ids in enumerate(self.seen) if ids and job_id in ids), None)

    def num_beats(self, first: int, last: int) -> int:
        """Heartbeats between two places."""
        return self.seen[first:last].count(None)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Rounds:
    rounds = Rounds()
    claim = claims.claim
    beat = leases.heartbeat

    def claiming(*given: Any, **named: Any) -> list[ClaimedJob]:
        claimed = claim(*given, **named)
        rounds.seen.append(tuple(one.job_id for one in claimed))
        return claimed

    def beating(*given: Any, **named: Any) -> Any:
        rounds.beat()
        return beat(*given, **named)

    monkeypatch.setattr(claims, "claim", claiming)
    monkeypatch.setattr(leases, "heartbeat", beating)
    return rounds


@dataclass(slots=True, kw_only=True)
class Sender:
    """Sends messages for jobs over Redis to a head's worker."""

    app: Celery
    database: Database

    def send(self, job_id: UUID, priority: int) -> None:
        """As a relay does."""
        self.app.send_task(
            GENERATE_TASK, args=[str(job_id)], task_id=str(job_id), queue=QUEUE, priority=priority
        )

    def arrive(self, num: int) -> list[UUID]:
        """Fresh jobs of the best priority, with long prompts."""
        wanted = [request(max_tokens=1, priority=0) for _ in range(num)]
        with self.database.begin() as connection:
            stored = jobs.insert_jobs(connection, wanted, prepared=[((5,) * LONG_PROMPT, 1)] * num)
        ids = [one.job_id for one in stored]
        for job_id in ids:
            self.send(job_id, 0)
        return ids


@pytest.fixture
def sender_and_head(
    database: Database, executor: Executor, redis_url: str
) -> Iterator[tuple[Sender, LoneHead]]:
    app = make_app(
        StageSettings(model=MODEL, redis_url=redis_url, seats=SEATS, interactive_seats=0)
    )
    app.conf.broker_connection_retry_on_startup = True
    app.amqp.queues.select_add(QUEUE)
    with open_lone_head(database, executor, redis_url, TIMES) as head:
        app.shardline = SimpleNamespace(
            delivery_handler=head.lease_manager,
            hub=HubCalls(Wakeup()),
            drain_s=5.0,
            skips_drain=False,
            interactive_seats=0,
        )
        with start_worker(
            app,
            concurrency=SEATS,
            pool=app.conf.worker_pool,
            perform_ping_check=False,
            shutdown_timeout=60,
        ):
            yield Sender(app=app, database=database), head


def test_a_suspect_with_a_seat_is_claimed_within_two_heartbeats_of_endless_arrivals(
    database: Database,
    sender_and_head: tuple[Sender, LoneHead],
    rounds: Rounds,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sender, head = sender_and_head
    rounds.num_steps = lambda: head.engine.progress.num_steps
    (suspect,) = submit(database)
    crash(database, suspect)
    placed: list[int] = []
    offer = head.lease_manager.offer

    def offering(delivery: Delivery) -> None:
        if delivery.job_id == str(suspect):
            placed.append(len(rounds.seen))
        offer(delivery)

    monkeypatch.setattr(head.lease_manager, "offer", offering)
    stopped = threading.Event()
    arriving = threading.Thread(target=_arrive, args=(sender, suspect, stopped))
    arriving.start()
    try:
        until(lambda: cell(database, "SELECT count(*) FROM jobs WHERE fence > 0") >= SEATS - 2)
        sender.send(suspect, 0)
        until(lambda: rounds.place(suspect) is not None)
        claimed = rounds.place(suspect)
        assert claimed is not None
        until(lambda: any(ids for ids in rounds.seen[claimed + 1 :]))
    finally:
        stopped.set()
        arriving.join()

    assert rounds.seen[claimed] == (suspect,), "alone"
    assert rounds.num_beats(placed[0], claimed) <= HEARTBEATS, rounds.seen


def _arrive(sender: Sender, suspect: UUID, stopped: threading.Event) -> None:
    """Always as many as leave one seat free, each new one as soon as one is gone."""
    going = "SELECT count(*) FROM jobs WHERE state IN ('queued', 'running') AND id <> :id"
    while not stopped.wait(0.01):
        missing = SEATS - 1 - cell(sender.database, going, id=suspect)
        if missing > 0:
            sender.arrive(missing)
