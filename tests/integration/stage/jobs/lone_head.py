"""A head without Celery and pipeline: a test offers jobs to its lease manager and reads the
verdicts. No test."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

from sqlalchemy import Engine as Database
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from services.stage.celery.delivery import Delivery
from services.stage.celery.hub_calls import HubCalls
from services.stage.engine.executor import Executor
from services.stage.engine.head_engine import HeadEngine
from services.stage.engine.memory import Limits
from services.stage.hop.wakeup import Wakeup
from services.stage.hop.wiring import Member, Wiring
from services.stage.job_telemetry import JobTelemetry
from services.stage.jobs.attempt_spans import AttemptSpans
from services.stage.jobs.delta_publisher import DeltaPublisher
from services.stage.jobs.engine_requests import EngineRequests
from services.stage.jobs.identity import Identity, identity_of
from services.stage.jobs.lease_host import LeaseHost
from services.stage.jobs.lease_manager import LeaseManager
from services.stage.jobs.live_job import LiveJob
from services.stage.jobs.outcome import JobOutcome
from services.stage.jobs.quarantine import Seats
from services.stage.metrics import StageMeter
from shardline.base.config import Times
from shardline.store import jobs, models
from shardline.streams import DeltaWriter
from shardline_scheduler.events import Event
from shardline_scheduler.scheduler import Scheduler
from shardline_scheduler.scheduler_config import SchedulerConfig
from shardline_scheduler.step_times import EngineProgress
from shardline_server.store.crashes import NO_CEILING
from shardline_server.tokenize import Tokens
from shardline_server.tracing import OFF, Tracer
from tests.integration.rows import MODEL, cell, change, model_row, request
from tests.links import make_card
from tests.models import VOCAB_SIZE, save_model
from tests.pinned import first_core
from tests.polling import until

TIMES = Times().scaled(0.2)
"""The protocol's, shorter."""
LONG = 4_000
"""More tokens than a test lets a job reach."""


@dataclass(slots=True, kw_only=True)
class LoneHead:
    """A lease manager with its engine; the test's thread plays Celery's."""

    database: Database
    lease_manager: LeaseManager
    engine: HeadEngine
    executor: Executor
    hub: HubCalls
    verdicts: queue.Queue[tuple[UUID, str]]
    numbers: Iterator[int]
    meter: StageMeter
    rows: list[int]
    """Of attempts that left it."""

    def blamed(self, outcome: str) -> float | None:
        """What a scraper reads."""
        return self.meter.registry.get_sample_value(
            "shardline_jobs_blamed_total", {"outcome": outcome}
        )

    def offer(self, job_id: UUID) -> None:
        """One delivery of a job."""
        self.lease_manager.offer(
            Delivery(
                number=next(self.numbers),
                job_id=str(job_id),
                hub=self.hub,
                on_accepted=lambda _number, _began_s: self.verdicts.put((job_id, "started")),
                on_ended=lambda outcome: self.verdicts.put((job_id, _name(outcome))),
                forget=lambda _number: True,
            )
        )

    def rebuild(self, num_blocks: int, exactness: str = "x") -> None:
        """A new epoch, with so much KV and stages of this exactness."""
        now = identity(self.executor, num_blocks, exactness)
        self.lease_manager.let_go(now)
        self.engine.wire(wiring(self.executor, num_blocks, exactness))
        self.lease_manager.ready(now)

    def form(self, epoch: int, process: str) -> None:
        """The pipeline is ready again, its stage is this process; the engine stays wired."""
        self.lease_manager.lost()
        change(self.database, "UPDATE pipelines SET epoch = :epoch", epoch=epoch)
        self.engine.progress = EngineProgress(epoch=epoch)
        self.lease_manager.ready(identity(self.executor, epoch=epoch, process=process))

    def verdict(self) -> tuple[UUID, str]:
        """The next thing that Celery is told."""
        until(self._has_verdict)
        return self.verdicts.get_nowait()

    def _has_verdict(self) -> bool:
        self.hub.take()
        return not self.verdicts.empty()


class RowCounter(JobTelemetry):
    """Notes the rows of attempts that leave the head, too."""

    def __init__(self, meter: StageMeter, spans: AttemptSpans) -> None:
        super().__init__(meter, spans, row_j=lambda: 0.0)
        self.rows: list[int] = []

    def ended(self, outcome: JobOutcome) -> None:
        self.rows.append(outcome.num_rows)
        super().ended(outcome)

    def given_back(self, job: LiveJob, outcome: str) -> None:
        self.rows.append(job.num_rows())
        super().given_back(job, outcome)


def _name(outcome: tuple[int, Any, float]) -> str:
    failed, value, _ = outcome
    return type(value.exception.exc).__name__ if failed else "succeeded"


def submit(database: Database, max_tokens: int, **fields: Any) -> UUID:
    """One prepared job that runs to its limit."""
    wanted = request(max_tokens=max_tokens, ignore_eos=True, seed=5, **fields)
    with database.begin() as connection:
        return jobs.insert_jobs(connection, [wanted], prepared=[((5, 6), max_tokens)])[0].job_id


def saved_tokens(database: Database, job_id: UUID) -> int:
    """Checkpointed tokens of the newest attempt."""
    query = "SELECT coalesce(max(cardinality(tokens)), 0) FROM attempts WHERE job_id = :id"
    return int(cell(database, query, id=job_id))


def loaded_stage(executor: Executor, times: Times) -> SimpleNamespace:
    """What its meter reads of a stage."""
    return SimpleNamespace(
        executor=executor,
        settings=SimpleNamespace(name="m", times=times),
        is_head=True,
        drift=None,
        power=None,
        layers=range(4),
        worker="h",
        device=SimpleNamespace(name="cpu:0"),
    )


def _requests(executor: Executor, spans: AttemptSpans) -> EngineRequests:
    ids = {f"<{number}>": number for number in range(VOCAB_SIZE)}
    return EngineRequests(
        tokens=Tokens(
            model="m",
            tokenizer_json=Tokenizer(WordLevel(ids, unk_token="<0>")).to_str(),
            chat_template=None,
            special_tokens={},
            context_length=4096,
            vocab_size=executor.info.vocab_size,
            eos_ids=(2,),
        ),
        adapters=executor.adapters,
        spans=spans,
    )


@contextmanager
def open_lone_head(
    database: Database, executor: Executor, redis_url: str, times: Times, tracer: Tracer = OFF
) -> Iterator[LoneHead]:
    """Ready to take jobs."""

    def report(events: Sequence[Event]) -> None:
        lease_manager.report(events)

    engine = HeadEngine(executor, _scheduler(executor), emit=report, on_lost=lambda *_: None)
    publisher = DeltaPublisher(DeltaWriter(redis_url))
    announced = threading.Event()
    meter = StageMeter(cast(Any, loaded_stage(executor, times)))
    spans = AttemptSpans(tracer)
    counter = RowCounter(meter, spans)
    lease_manager = LeaseManager(
        database=database,
        engine=engine,
        requests=_requests(executor, spans),
        publisher=publisher,
        host=LeaseHost(
            limits=NO_CEILING,
            results=None,
            observer=counter,
            register_model=lambda connection: models.register_model(connection, model_row(MODEL)),
            on_announced=announced.set,
            on_superseded=lambda *_: None,
        ),
        seats=Seats(num_any=8, num_interactive=0),
        times=times,
    )
    for thread in (publisher, engine, lease_manager):
        thread.start()
    engine.wire(wiring(executor))
    lease_manager.ready(identity(executor))
    assert announced.wait(30)
    yield LoneHead(
        database=database,
        lease_manager=lease_manager,
        engine=engine,
        executor=executor,
        hub=HubCalls(Wakeup()),
        verdicts=queue.Queue(),
        numbers=count(1),
        meter=meter,
        rows=counter.rows,
    )
    for thread in (lease_manager, engine, publisher):
        thread.stop()
        thread.join()


def _scheduler(executor: Executor) -> Scheduler:
    config = SchedulerConfig(
        num_blocks=executor.num_blocks,
        max_seats=8,
        token_budget=64,
        num_lanes=1,
        max_len=4096,
        max_adapters=2,
    )
    return Scheduler(config)


@contextmanager
def tiny_executor(folder: Path) -> Iterator[Executor]:
    """A tiny Llama with a long context, whole, on core 0; leaves the process as it was."""
    with first_core(folder / "locks") as device:
        yield Executor.load(
            model=save_model(folder, max_position_embeddings=4096),
            layers=range(4),
            device=device,
            dtype="float32",
            limits=Limits(
                kv_bytes=64 << 20,
                token_budget=64,
                max_open=16,
                adapters_folder=folder / "adapters",
                max_adapters=2,
            ),
            cache_folder=folder / "cache",
        )


def wiring(
    executor: Executor,
    num_blocks: int | None = None,
    exactness: str = "x",
    *,
    epoch: int = 1,
    process: str = "first",
) -> Wiring:
    """Of the only stage."""
    num_blocks = num_blocks or executor.num_blocks
    names = {"model": "m", "worker": "h", "fingerprint": "w", "power": "table"}
    card = make_card(0, 4, num_blocks=num_blocks, exactness=exactness, incarnation=process, **names)
    return Wiring(
        pipeline=uuid4(),
        epoch=epoch,
        stage_index=0,
        num_stages=1,
        num_lanes=1,
        num_blocks=num_blocks,
        receiver=None,
        sender=None,
        members=(Member(card=card),),
    )


def identity(
    executor: Executor, num_blocks: int | None = None, exactness: str = "x", **changes: Any
) -> Identity:
    """Of the only stage, in its first epoch."""
    return identity_of(
        wiring(executor, num_blocks, exactness, **changes),
        pipeline="p",
        revision=None,
        software={"torch": "any"},
    )
