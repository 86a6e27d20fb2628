"""The Celery pool that is the continuous batch: its seats are places in the batch, its tasks end
asynchronously.

`on_apply` returns at once; verdicts come back through the hub and are settled in Celery's own
thread. The pool never runs a task body: the engine does the work.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from uuid import UUID

import structlog
from celery.concurrency.base import BasePool
from kombu.serialization import loads
from typing_extensions import override

from services.stage.celery.delivery import Delivery
from services.stage.celery.hub_calls import HubCalls
from shardline.base.clock import monotonic_s
from shardline.contract.job import DEFAULT_PRIORITY

log = structlog.get_logger(__name__)

POLL_S = 0.2


class DeliveryHandler(Protocol):
    """Takes deliveries: the head's lease manager. A follower drops them."""

    def offer(self, delivery: Delivery) -> None:
        """Claim the delivery's row, soon. Must not block."""

    def close(self) -> None:
        """Take no new work; give back at once what is not claimed yet."""

    def give_back(self) -> None:
        """Checkpoint, give back every lease, and give a verdict on every delivery."""

    def cancel(self, job_ids: Sequence[str]) -> int:
        """Stop those that run here; how many did."""

    def stats(self) -> Mapping[str, Any]:
        """Counters for `inspect stats`."""


class EnginePool(BasePool):
    """Set as `worker_pool`; finds its handler and its drain time on the Celery app
    (`app.shardline`)."""

    signal_safe = False
    body_can_be_buffer = True
    task_join_will_block = False
    limit: int

    def on_start(self) -> None:
        """Called once by Celery, after the model is loaded."""
        self._handler: DeliveryHandler = self.app.shardline.delivery_handler
        self._drain_s: float = self.app.shardline.drain_s
        self._hub: HubCalls = self.app.shardline.hub
        self._num_interactive: int = self.app.shardline.interactive_seats
        self._numbers = itertools.count(1)
        self._deliveries: dict[int, Delivery] = {}

    def register_with_event_loop(self, loop: Any) -> None:
        """Verdicts wake Celery's hub."""
        loop.add_reader(self._hub.fd, self._hub.take)

    def has_seat(self) -> bool:
        """Returns whether one more message may come, for any job."""
        return len(self._deliveries) < self.limit

    def has_interactive_seat(self) -> bool:
        """Returns whether one more message may come, for an interactive job."""
        return len(self._deliveries) < self.limit + self._num_interactive

    @override
    def on_apply(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        callback: Callable[..., None] | None = None,
        accept_callback: Callable[..., None] | None = None,
        **options: Any,
    ) -> Delivery:
        """A message arrived. `args` are those of Celery's tracer: the body holds the job's id."""
        assert callback is not None
        assert accept_callback is not None
        _, task_id, request, body, content_type, content_encoding = args
        is_job = _names_a_job(task_id, body, content_type, content_encoding)
        delivery = Delivery(
            number=next(self._numbers),
            job_id=str(task_id),
            priority=_priority(request),
            hub=self._hub,
            on_accepted=accept_callback,
            on_ended=callback,
            forget=lambda number: self._deliveries.pop(number, None) is not None,
        )
        self._deliveries[delivery.number] = delivery
        if is_job:
            self._handler.offer(delivery)
        else:
            log.warning("a message without a job's id is dropped", task_id=str(task_id)[:64])
            delivery.drop()
        return delivery

    @override
    def terminate_job(self, pid: int, signal: int | None = None) -> None:
        """Celery's own terminate is not used: `remote_control.revoke` goes through the row."""

    def grow(self, n: int = 1) -> None:
        """Seats can be added at run time; KV blocks still bound what runs at once."""
        self.limit += n

    def shrink(self, n: int = 1) -> None:
        """Fewer new deliveries; those that hold a seat keep it."""
        self.limit = max(1, self.limit - n)

    def on_stop(self) -> None:
        """Warm shutdown. Celery's hub no longer polls, so verdicts are settled here, up to the
        drain time."""
        self._handler.close()
        if not self.app.shardline.skips_drain:
            self._settle_until(monotonic_s() + self._drain_s)
        if self._deliveries:
            log.info("leases are given back", jobs=len(self._deliveries))
            self._handler.give_back()
            self._settle_until(monotonic_s() + self._drain_s / 3)

    def on_terminate(self) -> None:
        """Cold shutdown: leases expire, or are given back if Postgres answers at once."""
        self._handler.give_back()

    def _settle_until(self, deadline_s: float) -> None:
        while self._deliveries and monotonic_s() < deadline_s:
            self._hub.wait(POLL_S)
            self._hub.take()

    def _get_info(self) -> dict[str, Any]:
        return {
            **super()._get_info(),
            "seats_taken": len(self._deliveries),
            **self._handler.stats(),
        }


def _priority(request: Mapping[str, Any]) -> int:
    """Returns the message's priority: the row's when it was sent."""
    info = request.get("delivery_info")
    priority = info.get("priority") if isinstance(info, Mapping) else None
    return priority if isinstance(priority, int) else DEFAULT_PRIORITY


def _names_a_job(
    task_id: object, body: Any, content_type: str | None, content_encoding: str | None
) -> bool:
    """The relay sends one argument, the job's id, which is also the task's."""
    try:
        (argument,), _, _ = loads(body, content_type, content_encoding, accept={"application/json"})
        return UUID(str(task_id)) == UUID(str(argument))
    except Exception:  # noqa: BLE001 (its delivery is dropped and frees its seat)
        return False
