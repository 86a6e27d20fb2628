"""A head stage: scheduler and engine, its pipeline, the leases of its jobs. The only stage that
takes jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import structlog
from sqlalchemy import Connection
from sqlalchemy import Engine as Database
from sqlalchemy.exc import DBAPIError

from services.stage.backends import Backends
from services.stage.celery.hub_calls import HubCalls
from services.stage.celery.subscription import QueueSubscription
from services.stage.engine.head_engine import HeadEngine
from services.stage.hop.wiring import Wiring
from services.stage.hop.zeromq import ZeroMqHop
from services.stage.job_telemetry import JobTelemetry
from services.stage.jobs.attempt_spans import AttemptSpans
from services.stage.jobs.delta_publisher import DeltaPublisher
from services.stage.jobs.engine_requests import EngineRequests
from services.stage.jobs.identity import identity_of
from services.stage.jobs.lease_host import LeaseHost
from services.stage.jobs.lease_manager import LeaseManager
from services.stage.jobs.quarantine import Seats
from services.stage.jobs.result_publisher import ResultPublisher
from services.stage.metrics import StageMeter
from services.stage.pipeline.assembly import PipelineAssembly
from services.stage.pipeline.energy_writer import EnergyWriter, epoch_energy
from services.stage.pipeline.epochs import Epochs
from services.stage.pipeline.hosts import PipelineHost
from services.stage.pipeline.pipeline import Pipeline
from services.stage.pipeline.status import StageProgress
from services.stage.runtime import LoadedStage, pipeline_of, software
from services.stage.stage_spans import step_observer
from shardline.base.errors import Unavailable
from shardline.contract.queues import generate_queue
from shardline.store.connection.database import failure_of, unavailable
from shardline.store.models import register_adapters, register_model
from shardline.store.statistics.costs import EpochEnergy
from shardline_scheduler.events import Event
from shardline_scheduler.scheduler import Scheduler
from shardline_scheduler.scheduler_config import SchedulerConfig
from shardline_server.store import leases
from shardline_server.store.crashes import AttemptLimits
from shardline_server.tokenize import Tokens
from shardline_server.tracing import Tracer

log = structlog.get_logger(__name__)

RESULTS_S = 5.0
"""A head that stops waits so long for results to be stored: the backend may hang."""


def end_leases_of_predecessor(database: Database, *, worker: str, pipeline: str) -> None:
    """Ends them before the weights are read: meanwhile a head that waits may run the jobs that this
    one's predecessor held.

    Call it while holding the device, which no living predecessor would have let go. Raises
    Unavailable.
    """
    try:
        with database.begin() as connection:
            num_held = leases.expire_held_by(connection, worker=worker, pipeline=pipeline)
    except DBAPIError as error:
        raise unavailable(error) from error
    if num_held:
        log.warning("this head's predecessor left jobs behind: they are requeued", jobs=num_held)


class Head:
    """The parts of a head, and the order in which they start and stop."""

    def __init__(self, loaded: LoadedStage, backends: Backends) -> None:
        settings = loaded.settings
        self._loaded = loaded
        self._backends = backends
        self._settings = settings
        self.worker = loaded.worker
        self.drain_s = settings.times.drain_s
        self.skips_drain = False
        self.interactive_seats = settings.interactive_seats
        self.hub = HubCalls(loaded.sockets.wakeup())
        self.meter = StageMeter(loaded)
        self._tracer = Tracer.from_environment("head")
        self._spans = AttemptSpans(self._tracer)
        self._name = pipeline_of(settings, loaded.worker, loaded.device)
        self._database = backends.open_database(application_name=f"shardline {loaded.worker}")
        self._epochs = Epochs(
            self._database,
            self._name,
            model=settings.name,
            fingerprint=loaded.card.fingerprint,
            head=loaded.worker,
            lease_s=settings.times.lease_s,
        )
        self._model_row = loaded.info.row(
            name=settings.name,
            fingerprint=loaded.card.fingerprint,
            chat_template=settings.chat_template,
            reply_family=settings.reply_family,
        )
        self._publisher = DeltaPublisher(backends.open_delta_sink())
        store_result = backends.result_store()
        self._results = None if store_result is None else ResultPublisher(store_result)
        self._registry = backends.open_registry()
        self.subscription = QueueSubscription(generate_queue(settings.name), self.hub)
        self._adapter_watch = loaded.watch_adapters(self._register_adapters)
        self._scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=loaded.executor.num_blocks,
                max_seats=settings.seats + settings.interactive_seats,
                token_budget=loaded.executor.token_budget,
                num_lanes=1,
                max_len=loaded.info.context_length,
                prefix_cache=settings.prefix_cache and loaded.info.encoder is None,
                prompt_lookup=settings.prompt_lookup,
                pools=loaded.info.encoder is not None,
                max_adapters=loaded.executor.max_adapters,
            )
        )
        self._pipeline = self._make_pipeline()
        self._engine = HeadEngine(
            loaded.executor,
            self._scheduler,
            emit=self._report,
            on_lost=self._pipeline.lost,
            on_step=step_observer(loaded, self.meter, self._tracer),
        )
        every_s = settings.times.heartbeat_s
        self._energy = EnergyWriter(self._database, self._measure_energy, every_s=every_s)
        self.delivery_handler = self._make_lease_manager()
        self.meter.watch(self._scheduler, self._pipeline)

    def _make_lease_manager(self) -> LeaseManager:
        return LeaseManager(
            database=self._database,
            engine=self._engine,
            requests=EngineRequests(
                tokens=Tokens.from_row(self._model_row),
                adapters=self._loaded.executor.adapters,
                spans=self._spans,
            ),
            publisher=self._publisher,
            host=LeaseHost(
                limits=AttemptLimits.of(self._settings),
                results=self._results,
                observer=JobTelemetry(self.meter, self._spans, self._energy.row_j),
                register_model=self._register_model,
                on_announced=self.subscription.open,
                on_superseded=self._pipeline.lost,
            ),
            seats=Seats(
                num_any=self._settings.seats, num_interactive=self._settings.interactive_seats
            ),
            times=self._settings.times,
        )

    def _make_pipeline(self) -> Pipeline:
        loaded = self._loaded
        settings = self._settings
        assembly = PipelineAssembly(
            pipeline=uuid5(NAMESPACE_URL, f"pipeline {self._name}"),
            card=loaded.card,
            sockets=loaded.sockets,
            hop=ZeroMqHop(loaded.sockets, settings.times),
            timeout_s=settings.times.link_dead_s,
            num_lanes=settings.lanes,
            next_epoch=self._epochs.take,
            far_int8=settings.hop_activations == "int8",
        )
        return Pipeline(assembly, settings.times)

    def start(self) -> None:
        """Registers the model, then forms the pipeline. Raises Unavailable when Postgres cannot be
        reached."""
        try:
            with self._database.begin() as connection:
                register_model(connection, self._model_row)
        except DBAPIError as error:
            raise unavailable(error) from error
        self._publisher.start()
        if self._results is not None:
            self._results.start()
        if self._adapter_watch is not None:
            self._adapter_watch.start()
        self.delivery_handler.start()
        self._engine.start()
        self._pipeline.start(
            PipelineHost(
                list_cards=partial(self._registry.cards, self._settings.name),
                on_ready=self._on_ready,
                on_lost=self._on_lost,
                use_lanes=self._engine.use_lanes,
                progress=self._progress,
                exit=self._backends.exit,
            )
        )
        self._energy.start()

    def describe(self) -> Mapping[str, Any]:
        """Returns what `inspect stage` shows."""
        return {
            **self._loaded.describe(),
            "role": "head",
            "steps": self._engine.num_steps,
            "bubble_share": self._engine.progress.bubble_share,
            "running": self._scheduler.num_running,
            "waiting": self._scheduler.num_waiting,
            "kv_slots_used": self._scheduler.slots_used,
            "snapshots": self._scheduler.num_snapshots,
            "lanes": self._scheduler.config.num_lanes,
            "pipeline": {**self._pipeline.status().describe(), "name": self._name},
        }

    def trace(self) -> Mapping[str, Any]:
        """Returns what `shardline trace` shows."""
        pipeline = self._pipeline.status().pipeline
        return self._loaded.trace(pipeline, self._engine.clock.step_times.last())

    def stop(self) -> None:
        """Leases are given back, then the stages are released."""
        if self._adapter_watch is not None:
            self._adapter_watch.stop()
        self.delivery_handler.stop()
        self.delivery_handler.join()
        self._energy.stop()
        self._energy.join()
        self._pipeline.stop()
        self._epochs.release()
        self._engine.stop()
        self._engine.join()
        self._publisher.stop()
        self._publisher.join()
        if self._results is not None:
            self._results.stop()
            self._results.join(RESULTS_S)
        self._registry.close()
        self._tracer.close()
        self._database.dispose()
        self._loaded.device.release()

    def _report(self, events: Sequence[Event]) -> None:
        """The engine's thread."""
        self.meter.report(events)
        self.delivery_handler.report(events)

    def _register_model(self, connection: Connection) -> None:
        """The lease manager's thread: the row was deleted."""
        register_model(connection, self._model_row)
        found = self._loaded.executor.adapters.known()
        register_adapters(connection, self._settings.name, found)

    def _register_adapters(self, adapters: Mapping[str, str]) -> None:
        """The adapter watch's thread: doors take jobs for these. Raises Unavailable."""
        try:
            with self._database.begin() as connection:
                register_adapters(connection, self._settings.name, adapters)
        except DBAPIError as error:
            raise Unavailable(failure_of(error)) from error

    # The pipeline's thread
    # ----------------------------------------------------------------------------------------

    def _on_ready(self, wiring: Wiring) -> None:
        """The engine steps from now on; jobs come once Postgres knows."""
        identity = identity_of(
            wiring,
            pipeline=self._name,
            revision=self._loaded.info.revision,
            software={"dtype": self._settings.dtype, **software()},
        )
        self.delivery_handler.let_go(identity)
        self._engine.wire(wiring)
        self.delivery_handler.ready(identity)

    def _on_lost(self) -> None:
        """No more jobs come; those that run keep their leases for a while."""
        self.subscription.close()
        self._engine.unwire()
        self.delivery_handler.lost()

    def _progress(self) -> StageProgress:
        """Returns what the engine has done in its epoch."""
        progress = self._engine.progress
        return StageProgress(
            epoch=progress.epoch,
            num_steps=progress.num_steps - self._scheduler.num_in_flight,
            num_outstanding=self._engine.num_awaited,
            busy_s=progress.compute_s + progress.hop_s,
            step_began_s=self._engine.clock.step_began_s,
        )

    def _measure_energy(self) -> EpochEnergy | None:
        """Any thread."""
        status = self._pipeline.status()
        progress = self._engine.progress
        return epoch_energy(self._name, status, progress, self._loaded.watts)
