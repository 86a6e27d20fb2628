"""A middle or tail stage: its engine, its control link, its card. It never talks to Postgres and takes no job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.stage.celery.delivery import Delivery
from services.stage.celery.hub_calls import HubCalls
from services.stage.engine.engine import FollowerEngine
from services.stage.hop.zeromq import ZeroMqHop
from services.stage.metrics import StageMeter
from services.stage.pipeline.control_server import ControlServer
from services.stage.pipeline.registry import Announcer, Registry
from services.stage.pipeline.status import StageStatus
from services.stage.runtime import Loaded
from shardline.threads import die
from shardline.wire import StageCard


class NoDeliveries:
    """The desk of a stage to which no job is ever sent."""

    def offer(self, ticket: Delivery) -> None:
        """Acknowledged unread."""
        ticket.drop()

    def cancel(self, job_ids: Sequence[str]) -> int:  # noqa: ARG002 (the Desk's signature)
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
    """The parts of a later stage, and the order in which they start and stop."""

    def __init__(self, loaded: Loaded) -> None:
        times = loaded.settings.times
        self._loaded = loaded
        self.worker = loaded.worker
        self.drain_s = times.drain_s
        self.interactive_seats = 0
        self.mailbox = HubCalls()
        self.desk = NoDeliveries()
        self.meter = StageMeter(loaded)
        self._engine = FollowerEngine(loaded.executor, on_lost=self._on_lost, on_step=self.meter.step)
        self._registry = Registry(loaded.settings.redis_url)
        self._announcer = Announcer(self._registry, self._card)
        self._link = ControlServer(
            card=loaded.card,
            capacity=loaded.capacity,
            sockets=loaded.sockets,
            hop=ZeroMqHop(loaded.sockets, times),
            times=times,
            on_wiring=self._engine.wire,
            on_unbind=self._engine.unwire,
            on_exit=die,
            status=self._status,
            on_card=self._announcer.touch,
        )

    def start(self) -> None:
        """Answers heads from now on."""
        self._engine.start()
        self._link.start()
        self._announcer.start()

    def attach(self, consumer: Any) -> None:
        """Celery serves remote control only."""

    def describe(self) -> Mapping[str, Any]:
        """For `inspect stage`."""
        pulse = self._engine.pulse
        return {
            **self._loaded.describe(),
            "role": "tail" if self._loaded.executor.is_last else "middle",
            "bound_to": self._link.card().bound_to,
            "epoch": pulse.epoch,
            "steps": pulse.num_steps,
        }

    def stop(self) -> None:
        """The head sees the link close, and forms its pipeline anew."""
        self._announcer.stop()
        self._link.stop()
        self._engine.stop()
        self._engine.join()
        self._registry.close()
        self._loaded.device.release()

    def _on_lost(self, *_: object) -> None:
        """The pulse holds the error; the head must hear of it now."""
        self._link.report()

    def _card(self) -> StageCard:
        return self._link.card()

    def _status(self) -> StageStatus:
        pulse, executor = self._engine.pulse, self._loaded.executor
        return StageStatus(
            epoch=pulse.epoch,
            num_steps=pulse.num_steps,
            num_sequences=executor.num_open,
            num_blocks_used=executor.blocks_used,
            compute_us=int(pulse.compute_s * 1e6),
            hop_us=int(pulse.hop_s * 1e6),
            error=pulse.error,
        )
