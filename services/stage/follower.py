"""A follower is a middle or tail stage: engine, control link, card. It never talks to Postgres and
takes no job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.stage.backends import Backends
from services.stage.celery.delivery import Delivery
from services.stage.celery.hub_calls import HubCalls
from services.stage.engine.engine import FollowerEngine
from services.stage.hop.wiring import Wiring
from services.stage.hop.zeromq import ZeroMqHop
from services.stage.metrics import StageMeter
from services.stage.pipeline.control_server import ControlServer
from services.stage.pipeline.registry import Announcer
from services.stage.pipeline.status import StageStatus
from services.stage.runtime import LoadedStage
from services.stage.stage_spans import step_observer
from shardline.contract.wire import StageCard
from shardline_server.tracing import Tracer


class NoDeliveries:
    """The delivery_handler of a stage to which no job is ever sent."""

    def offer(self, delivery: Delivery) -> None:
        """Acknowledged unread."""
        delivery.drop()

    def cancel(self, job_ids: Sequence[str]) -> int:  # noqa: ARG002 (DeliveryHandler's signature)
        """Nothing runs here under a job's id."""
        return 0

    def close(self) -> None:
        """Nothing to close."""

    def give_back(self) -> None:
        """Nothing to give back."""

    def stats(self) -> Mapping[str, Any]:
        """Nothing to count."""
        return {}


class Follower:
    """The parts of a follower, and the order in which they start and stop. A control link's
    StageHost."""

    def __init__(self, loaded: LoadedStage, backends: Backends) -> None:
        times = loaded.settings.times
        self._loaded = loaded
        self._backends = backends
        self.worker = loaded.worker
        self.drain_s = times.drain_s
        self.skips_drain = False
        self.interactive_seats = 0
        self.subscription = None
        self.hub = HubCalls(loaded.sockets.wakeup())
        self.delivery_handler = NoDeliveries()
        self.meter = StageMeter(loaded)
        self._tracer = Tracer.from_environment("stage")
        self._engine = FollowerEngine(
            loaded.executor,
            on_lost=self._on_lost,
            on_step=step_observer(loaded, self.meter, self._tracer),
        )
        self._registry = backends.open_registry()
        self._announcer = Announcer(self._registry, self._card)
        self._adapter_watch = loaded.watch_adapters()
        self._control = ControlServer(
            card=loaded.card,
            sockets=loaded.sockets,
            hop=ZeroMqHop(loaded.sockets, times),
            host=self,
            times=times,
        )

    def start(self) -> None:
        """Answers heads from now on."""
        self._engine.start()
        self._control.start()
        self._announcer.start()
        if self._adapter_watch is not None:
            self._adapter_watch.start()

    def describe(self) -> Mapping[str, Any]:
        """Returns what `inspect stage` shows."""
        progress = self._engine.progress
        return {
            **self._loaded.describe(),
            "role": "tail" if self._loaded.executor.is_last else "middle",
            "bound_to": self._control.card().bound_to,
            "epoch": progress.epoch,
            "steps": progress.num_steps,
            "bubble_share": progress.bubble_share,
        }

    def trace(self) -> Mapping[str, Any]:
        """Returns what `shardline trace` shows."""
        pipeline = self._control.card().bound_to or ""
        return self._loaded.trace(pipeline, self._engine.clock.step_times.last())

    def stop(self) -> None:
        """The card goes first, then the link: the head sees it close and forms its pipeline without
        this stage."""
        if self._adapter_watch is not None:
            self._adapter_watch.stop()
        self._announcer.stop()
        self._control.stop()
        self._engine.stop()
        self._engine.join()
        self._registry.close()
        self._tracer.close()
        self._loaded.device.release()

    def wire(self, wiring: Wiring) -> None:
        """A head begins an epoch with this stage."""
        self._engine.wire(wiring)

    def unwire(self) -> None:
        """The epoch is over."""
        self._engine.unwire()

    def card_changed(self) -> None:
        """The registry shall know who holds the stage."""
        self._announcer.touch()

    def status(self) -> StageStatus:
        """Returns the status for the head that holds the stage."""
        progress = self._engine.progress
        executor = self._loaded.executor
        return StageStatus(
            epoch=progress.epoch,
            num_steps=progress.num_steps,
            num_sequences=executor.num_open,
            num_blocks_used=executor.blocks_used,
            compute_us=int(progress.compute_s * 1e6),
            hop_us=int(progress.hop_s * 1e6),
            wait_us=int(progress.wait_s * 1e6),
            power_mw=round(self._loaded.watts * 1e3),
            error=progress.error,
        )

    def exit(self, reason: str) -> None:
        """A supervisor starts the stage again."""
        self._backends.exit(reason)

    def _on_lost(self, *_: object) -> None:
        """The engine's progress holds the error; the head must hear of it now."""
        self._control.report()

    def _card(self) -> StageCard:
        return self._control.card()
