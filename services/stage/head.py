"""A head stage: scheduler and engine, its pipeline, the ledger of its jobs. The only stage that takes jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import structlog
from celery import Celery
from sqlalchemy.exc import DBAPIError

from services.stage.celery.hub_calls import HubCalls
from services.stage.celery.subscription import QueueSubscription
from services.stage.engine.engine import HeadEngine
from services.stage.hop.wiring import Wiring
from services.stage.hop.zeromq import ZeroMqHop
from services.stage.jobs.delta_publisher import DeltaPublisher
from services.stage.jobs.engine_requests import EngineRequests
from services.stage.jobs.identity import identity_of
from services.stage.jobs.lease_manager import LeaseManager
from services.stage.jobs.quarantine import Seats
from services.stage.metrics import StageMeter
from services.stage.pipeline.epochs import Epochs
from services.stage.pipeline.pipeline import Pipeline
from services.stage.pipeline.registry import Registry
from services.stage.pipeline.status import StageProgress
from services.stage.runtime import Loaded, software
from services.stage.scheduling.events import Event
from services.stage.scheduling.scheduler import Scheduler, SchedulerConfig
from shardline.errors import Unavailable
from shardline.queues import generate_queue
from shardline.store import leases
from shardline.store.database import connect, failure_of
from shardline.store.models import register_model
from shardline.streams import DeltaWriter
from shardline.threads import die
from shardline.tokenise import Tokens

log = structlog.get_logger(__name__)


class Head:
    """The parts of a head, and the order in which they start and stop."""

    def __init__(self, loaded: Loaded, app: Celery) -> None:
        settings = loaded.settings
        self._loaded = loaded
        self._settings = settings
        self.worker = loaded.worker
        self.drain_s = settings.times.drain_s
        self.interactive_seats = settings.interactive_seats
        self.mailbox = HubCalls()
        self.meter = StageMeter(loaded)
        self._name = settings.pipeline or f"{settings.name}:{loaded.worker.partition('@')[2]}:{loaded.device.name}"
        self._database = connect(
            settings.database_url.get_secret_value(), application_name=f"shardline {loaded.worker}"
        )
        self._epochs = Epochs(
            self._database,
            self._name,
            model=settings.name,
            fingerprint=loaded.weights,
            head=loaded.worker,
            lease_s=settings.times.lease_s,
        )
        self._model_row = loaded.info.row(name=settings.name, fingerprint=loaded.weights)
        self._publisher = DeltaPublisher(
            DeltaWriter(settings.redis_url), app.backend.store_result if settings.result_backend else None
        )
        self._registry = Registry(settings.redis_url)
        self._intake = QueueSubscription(generate_queue(settings.name), self.mailbox)
        self._scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=loaded.executor.num_blocks,
                max_seats=settings.seats + settings.interactive_seats,
                token_budget=settings.token_budget,
                num_lanes=1,
                max_len=loaded.info.context_length,
            )
        )
        self._engine = HeadEngine(
            loaded.executor, self._scheduler, emit=self._report, on_lost=self._lose, on_step=self.meter.step
        )
        self.desk = self._make_ledger()
        self._pipeline = self._make_pipeline()
        self.meter.watch(self._scheduler, self._pipeline)

    def _make_ledger(self) -> LeaseManager:
        info = self._loaded.info
        return LeaseManager(
            database=self._database,
            engine=self._engine,
            requests=EngineRequests(
                tokenizer=Tokens.from_row(self._model_row).tokenizer,
                eos_ids=info.eos_ids,
                context_length=info.context_length,
            ),
            publisher=self._publisher,
            on_announced=self._intake.open,
            on_superseded=self._superseded,
            on_blamed=self.meter.blamed,
            seats=Seats(num_any=self._settings.seats, num_interactive=self._settings.interactive_seats),
            times=self._settings.times,
        )

    def _make_pipeline(self) -> Pipeline:
        loaded, settings = self._loaded, self._settings
        return Pipeline(
            pipeline=uuid5(NAMESPACE_URL, f"pipeline {self._name}"),
            card=loaded.card,
            capacity=loaded.capacity,
            sockets=loaded.sockets,
            hop=ZeroMqHop(loaded.sockets, settings.times),
            times=settings.times,
            cards=lambda: self._registry.cards(settings.name),
            next_epoch=self._epochs.take,
            on_ready=self._on_ready,
            on_lost=self._on_lost,
            on_exit=die,
            progress=self._progress,
            num_lanes=settings.lanes,
        )

    def start(self) -> None:
        """Registers the model, then forms the pipeline. Raises Unavailable when Postgres cannot be reached."""
        try:
            with self._database.begin() as connection:
                register_model(connection, self._model_row)
                num_held = leases.expire_held_by(connection, worker=self.worker, pipeline=self._name)
        except DBAPIError as error:
            raise Unavailable(f"{failure_of(error)}. Check SHARDLINE_DATABASE_URL and migrate") from error
        if num_held:
            log.warning("this head's predecessor left jobs behind: they are requeued", jobs=num_held)
        self._publisher.start()
        self.desk.start()
        self._engine.start()
        self._pipeline.start()

    def attach(self, consumer: Any) -> None:
        """Celery's consumer is up: the intake acts on it."""
        self._intake.attach(consumer)

    def describe(self) -> Mapping[str, Any]:
        """For `inspect stage`."""
        status = asdict(self._pipeline.status())
        return {
            **self._loaded.describe(),
            "role": "head",
            "steps": self._engine.pulse.num_steps,
            "running": self._scheduler.num_running,
            "waiting": self._scheduler.num_waiting,
            "pipeline": {**status, "name": self._name},
        }

    def stop(self) -> None:
        """Leases are given back, then the stages are released."""
        self.desk.stop()
        self.desk.join()
        self._pipeline.stop()
        self._epochs.release()
        self._engine.stop()
        self._engine.join()
        self._publisher.stop()
        self._publisher.join()
        self._registry.close()
        self._database.dispose()
        self._loaded.device.release()

    def _report(self, events: Sequence[Event]) -> None:
        self.desk.report(events)

    def _lose(self, epoch: int, reason: str) -> None:
        self._pipeline.lost(epoch, reason)

    def _superseded(self, epoch: int) -> None:
        self._lose(
            epoch, "another head took this pipeline: its lease had run out, or a process of the same name started"
        )

    def _on_ready(self, wiring: Wiring) -> None:
        self._engine.wire(wiring)
        self.desk.ready(
            identity_of(
                wiring,
                model=self._settings.name,
                worker=self.worker,
                pipeline=self._name,
                fingerprint=self._loaded.weights,
                revision=self._loaded.info.revision,
                dtype=self._settings.dtype,
                software=software(),
            )
        )

    def _on_lost(self, reason: str) -> None:  # noqa: ARG002 (the pipeline has logged it)
        self._intake.close()
        self._engine.unwire()
        self.desk.lost()

    def _progress(self) -> StageProgress:
        pulse = self._engine.pulse
        return StageProgress(
            epoch=pulse.epoch,
            num_steps=pulse.num_steps - self._scheduler.num_in_flight,
            num_outstanding=self._engine.num_awaited,
            step_began_s=self._engine.step_began_s,
        )
