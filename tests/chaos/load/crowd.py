"""The rest of the users' load: callers, a chooser, a Celery app with a canvas, a bulk load, a
caller of batches, tenants, cancels, readers in Python, bad messages, requests beyond limits, a look
at dead letters.

Knows no fault and no invariant. Nobody of it comes with the lab's load.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from typing import Any
from uuid import UUID

import httpx
import msgspec
import redis

from shardline.base.errors import JobCancelled, JobEnded, JobExpired, ShardlineError
from shardline.client import Client
from shardline.contract import keys
from shardline.contract.queues import GENERATE_TASK, INTAKE_QUEUE, SUBMIT_TASK, generate_queue
from tests.chaos.load.batch import ROWS_MAX, ROWS_PER_MINUTE, Batch
from tests.chaos.load.batches.batcher import Batcher
from tests.chaos.load.batches.sent_batch import SentBatch
from tests.chaos.load.callers import Caller
from tests.chaos.load.canvas import DOOR, by_canvas, dress
from tests.chaos.load.canvas_worker import CanvasWorker
from tests.chaos.load.chooser import Chooser, Customer, Customers
from tests.chaos.load.decider import Decider
from tests.chaos.load.doors import PATIENCE_S, gateway_client
from tests.chaos.load.encoders.embedder import Embedder, Scorer
from tests.chaos.load.journal import Asked, Journal
from tests.chaos.load.keeper import Keeper
from tests.chaos.load.limit_prober import LimitProber
from tests.chaos.load.producer import Producer
from tests.chaos.load.requests import MODEL
from tests.chaos.load.responder import Responder
from tests.chaos.load.target import ResultBackend, Target
from tests.chaos.load.tenants.ledger import TenantLedger
from tests.chaos.load.tenants.party import TenantParty, party
from tests.chaos.load.workload import MARK
from tests.chaos.report.finding import Finding
from tests.poisoned_messages import poisons

NUM_PYTHON_READERS = 2
CANCEL_EVERY_S = 5.0
LOOK_S = 1.0
POISON_EVERY_S = 3.0

Work = Callable[[], None]
Read = Callable[[UUID], object]


@dataclass(slots=True, kw_only=True)
class Crowd:
    """Threads beside the producers."""

    people: Mapping[str, Work] = field(default_factory=dict)
    read: Read | None = None
    batch: Batch | None = None
    batcher: Batcher | None = None
    canvas_worker: CanvasWorker | None = None
    tenants: TenantLedger = field(default_factory=TenantLedger)

    def workers(self, read: Callable[[Read], None]) -> Mapping[str, Work]:
        """What each thread runs. `read` finds jobs for a reader."""
        readers = range(NUM_PYTHON_READERS) if self.read else ()
        bulk = {"batch": self.batch.run} if self.batch else {}
        batches = {"batcher": self.batcher.run} if self.batcher else {}
        return {
            **self.people,
            **{f"python reader {i}": partial(read, self.read) for i in readers if self.read},
            **bulk,
            **batches,
        }

    def is_done(self, timeout_s: float) -> bool:
        """Whether its bulk load, its batches and what its tenants asked for have ended in time."""
        until_s = time.monotonic() + timeout_s
        ends = [each.is_done for each in (self.batch, self.batcher) if each is not None]
        ends += self.tenants.ends
        return all(end.wait(max(0.0, until_s - time.monotonic())) for end in ends)

    def held(self) -> list[Asked]:
        """What the journal does not have."""
        return [] if self.batch is None else list(self.batch.held)

    def batches(self) -> list[SentBatch]:
        """What was sent as batches."""
        return [] if self.batcher is None else list(self.batcher.sent)


def crowd(
    target: Target,
    stopping: threading.Event,
    drained: threading.Event,
    *,
    seed: int,
    minutes: float,
) -> Crowd:
    """For the target's load."""
    if not target.workload.is_users:
        return Crowd()
    client = Client(database_url=target.urls["database"], redis_url=target.urls["redis"])
    batch = Batch(
        client=client,
        journal=target.journal,
        workload=target.workload,
        num_rows=min(ROWS_MAX, int(ROWS_PER_MINUTE * minutes)),
        name=f"batch-{seed:x}",
        stopping=stopping,
        drained=drained,
    )
    batcher = Batcher(
        urls=target.urls,
        journal=target.journal,
        workload=target.workload,
        stopping=stopping,
        drained=drained,
        rng=random.Random(f"{seed} batcher"),
    )
    people = _callers(target, stopping, drained, seed)
    people["canceller"] = partial(
        _cancel, target, client, random.Random(f"{seed} canceller"), stopping, drained
    )
    people["poisoner"] = partial(_poison, target, random.Random(f"{seed} poisoner"), drained)
    people["dead letters"] = partial(_look_at_dead_letters, target, drained)
    tenants = TenantParty()
    if target.workload.generates:
        people["limit prober"] = _limit_prober(target, stopping, drained, seed).run
        tenants = party(target, stopping, drained, seed=seed)
        people |= tenants.people
    worker = None if target.results is None else _canvas_worker(target, target.results, drained)
    if worker is not None:
        people["canvas worker"] = worker.run
        people[DOOR] = _canvas_producer(target, worker, stopping, seed).run
    return Crowd(
        people=people,
        read=partial(_read, target.journal, client),
        batch=batch,
        batcher=batcher,
        canvas_worker=worker,
        tenants=tenants.ledger,
    )


def _limit_prober(
    target: Target, stopping: threading.Event, drained: threading.Event, seed: int
) -> LimitProber:
    return LimitProber(
        doors=LimitProber.doors_of(target.urls),
        journal=target.journal,
        stopping=stopping,
        drained=drained,
        rng=random.Random(f"{seed} limit prober"),
    )


def _canvas_worker(
    target: Target, results: ResultBackend, drained: threading.Event
) -> CanvasWorker:
    """Past every proxy: what becomes of a message on its way there is nobody's promise."""
    return CanvasWorker(
        broker_url=target.redis_url, backend_url=results.url, home=results.home, drained=drained
    )


def _canvas_producer(
    target: Target, worker: CanvasWorker, stopping: threading.Event, seed: int
) -> Producer:
    return Producer(
        name=DOOR,
        door=by_canvas(target.urls["redis"], worker.backend_url),
        journal=target.journal,
        workload=replace(target.workload, dress=dress),
        numbers=cycle(range(len(target.workload.requests))),
        stopping=stopping,
        drained=worker.drained,
        lasts=False,
        rng=random.Random(f"{seed} {DOOR}"),
    )


def _callers(
    target: Target, stopping: threading.Event, drained: threading.Event, seed: int
) -> dict[str, Work]:
    """Those of OpenAI's routes: who stream completions, who follow responses, and who want whole
    answers; of encoders, who want vectors and scores."""
    ends: dict[str, Any] = {"stopping": stopping, "drained": drained}

    def customers(name: str, *kinds: type[Customer]) -> Work:
        rng = random.Random(f"{seed} {name}")
        told: dict[str, Any] = {
            "journal": target.journal,
            "workload": target.workload,
            "drained": drained,
        }
        each = [kind(**told, rng=rng) for kind in kinds]
        return Customers(urls=target.urls, customers=each, rng=rng, **ends).run

    if not target.workload.generates:
        return {"embedder": customers("embedder", Embedder, Scorer)}
    caller = Caller(
        urls=target.urls,
        journal=target.journal,
        workload=target.workload,
        rng=random.Random(f"{seed} caller"),
        **ends,
    )
    return {
        "caller": caller.run,
        "responder": customers("responder", Responder),
        "chooser": customers("chooser", Chooser, Decider, Keeper),
    }


def _cancel(
    target: Target,
    client: Client,
    rng: random.Random,
    stopping: threading.Event,
    drained: threading.Event,
) -> None:
    """Now and then a job that somebody asked for by an ordinary door, by HTTP or in Python."""
    while not drained.wait(CANCEL_EVERY_S):
        waiting = [
            each
            for each in target.journal.open()
            if each.has_row and each.door in ("http", "sql", "redis")
        ]
        if not waiting or stopping.is_set():
            continue
        asked = rng.choice(waiting)
        asked.ends |= {"cancelled"}
        try:
            if rng.random() < 0.5:
                with gateway_client(target.urls, PATIENCE_S) as http:
                    http.delete(f"/v1/jobs/{asked.id}")
            else:
                client.cancel(asked.id)
        except (httpx.HTTPError, ShardlineError):
            continue


def _poison(target: Target, rng: random.Random, drained: threading.Event) -> None:
    """Now and then a message that is no task, at the Celery door or in the queue of the heads."""
    doors = ((SUBMIT_TASK, INTAKE_QUEUE), (GENERATE_TASK, generate_queue(MODEL)))
    while not drained.wait(POISON_EVERY_S):
        task, queue = rng.choice(doors)
        try:
            with redis.Redis.from_url(target.redis_url, socket_timeout=PATIENCE_S) as connection:
                connection.lpush(queue, rng.choice(list(poisons(task, queue).values())))
        except redis.RedisError:
            continue


def _read(journal: Journal, client: Client, job_id: UUID) -> None:
    """`Client.stream` to its end. What breaks off begins anew: a reader in Python keeps no
    place."""
    watched = journal.watch(job_id)
    watched.num_joins = 1
    watched.hears_partials = False
    try:
        for delta in client.stream(job_id):
            if delta.start != len(watched.tokens):
                watched.gaps.append(
                    f"a delta starts at {delta.start}, {len(watched.tokens)} tokens were there"
                )
            watched.tokens += delta.ids
            watched.text += delta.text
            watched.logprobs += msgspec.json.decode(msgspec.json.encode(delta.logprobs)) or ()
            watched.end_state = delta.state
            journal.streamed()
    except (JobCancelled, JobExpired) as ended:
        watched.end_state = "cancelled" if isinstance(ended, JobCancelled) else "expired"
    except JobEnded:
        watched.end_state = "failed"
    except ShardlineError:
        watched.end_state = None
    else:
        if watched.end_state != "succeeded":
            what = f"Client.stream ended without an error, the job is {watched.end_state}"
            journal.complain(Finding(invariant="I9", count="mistold", what=what, job_id=job_id))
    if watched.end_state == "succeeded":
        watched.end_tokens = list(watched.tokens)


def _look_at_dead_letters(target: Target, drained: threading.Event) -> None:
    """Requests of the load that the intake refused: each was good. Redis may forget them soon."""
    last = "-"
    while not drained.wait(LOOK_S):
        try:
            with redis.Redis.from_url(
                target.redis_url, socket_timeout=PATIENCE_S, decode_responses=True
            ) as connection:
                entries: list[tuple[str, dict[str, str]]] = connection.execute_command(
                    "XRANGE", keys.INTAKE_DEAD, last, "+"
                )
        except redis.RedisError:
            continue
        for entry_id, fields in entries:
            last = f"({entry_id}"
            if _is_ours(fields.get("request", "")):
                reason = fields.get("reason", "")
                count = "conflicts" if "conflict" in reason.lower() else "refused"
                what = f"the intake refused a good request: {reason[:300]}"
                target.journal.complain(Finding(invariant="I11", count=count, what=what))


def _is_ours(request: str) -> bool:
    """A document, or a message of Celery's, whose second part it is."""
    try:
        document = json.loads(request)
        return bool(
            (document[1] if isinstance(document, list) else document).get("metadata") == MARK
        )
    except (ValueError, AttributeError, LookupError, RecursionError):
        return False
