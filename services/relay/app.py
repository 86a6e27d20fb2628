"""The relay's Celery app: the `shardline.submit` task, the bootstep that runs the loops, and the
answers to remote control."""

from __future__ import annotations

from typing import Any

from celery import Celery, Task, bootsteps
from celery.app.task import Context
from celery.exceptions import Reject
from celery.worker.control import control_command, nok, ok
from kombu.utils.functional import maybe_list
from tenacity import RetryError

from services.relay.celery import atomic_transport
from services.relay.celery.celery_request import (
    EMBEDDED,
    check_of_all,
    check_of_tenant,
    headers_of_tenant,
    unlocked_body_id,
)
from services.relay.intake_request import IntakeTask
from services.relay.plain_json import read_plainly
from services.relay.relay import HeldUp, Relay
from services.relay.settings import RelaySettings
from shardline.base.type_info import prepare_loaded
from shardline.contract.queues import SUBMIT_TASK
from shardline.contract.tenants.tenant_door import TenantDoor
from shardline_server.broker import ExpiringControl, Reconnecting
from shardline_server.message_guard import RefusedMessage
from shardline_server.refusals import refusing

FIXED_POOL = (
    "a relay's threads are set when it starts: "
    "set SHARDLINE_CONCURRENCY and start it again, or start more relays"
)


class RelayStep(bootsteps.StartStopStep):
    """Runs next to Celery's consumer, also while the broker is unreachable; stops before the pool
    waits for tasks."""

    requires = ("celery.worker.components:Pool",)

    def start(self, parent: Any) -> None:
        """Start the loops with the worker."""
        parent.app.relay.start()

    def stop(self, parent: Any) -> None:
        """Stop the loops on a warm shutdown."""
        parent.app.relay.stop()

    def terminate(self, parent: Any) -> None:
        """Leave the loops behind on a cold shutdown: their threads are daemons."""
        parent.app.relay.close()


class IntakeConsumer(Reconnecting):
    """Consumes the Celery door's queue, and those of tenants with a door. What is no request there
    is kept with its reason."""

    _following: Any = None

    def start(self, c: Any) -> None:
        """Follow the doors of tenants while connected: some open or close."""
        super().start(c)
        poll_s = c.app.relay.poll_s
        self._following = c.hub.call_repeatedly(poll_s, self._follow, c)

    def stop(self, c: Any) -> None:
        """Stop following."""
        if self._following is not None:
            self._following.cancel()
        super().stop(c)

    def check(self, message: Any) -> None:
        """Raises ValueError for what a queue may not hold; takes away those headers of a tenant's
        that do not count."""
        if TenantDoor.of_queue(message.delivery_info["routing_key"]) is None:
            if (body_id := unlocked_body_id(message.headers, message.payload)) is not None:
                # Nobody waits for Celery's own task; it would be tried again for ever.
                message.headers = {**message.headers, "id": body_id}
                raise ValueError("a chord whose body is a job needs a Redis backend")
            check_of_all(message.headers, message.payload)
            return
        check_of_tenant(message.headers, message.payload)
        message.headers = headers_of_tenant(message.headers)

    def _follow(self, c: Any) -> None:
        wanted = {door.tasks for door in c.app.relay.doors}
        consumed = {queue.name for queue in c.task_consumer.queues}
        for queue in sorted(wanted - consumed):
            c.add_task_queue(queue)
        for queue in consumed - wanted:
            if TenantDoor.of_queue(queue) is not None:
                c.cancel_task_queue(queue)

    def refuse(self, c: Any, refused: RefusedMessage) -> None:
        """Raises redis.RedisError when it cannot be kept now: the message comes again."""
        c.app.relay.refuse(refused)


@control_command(name="revoke", variadic="task_id", signature="[id1 [id2 [... [idN]]]]")
def revoke(state: Any, task_id: Any, terminate: bool = False, **_: Any) -> dict[str, Any]:
    """Cancel rows, instead of Celery's own revoke. A running job is cancelled only with
    `terminate`."""
    num_jobs = state.app.relay.cancel(map(str, maybe_list(task_id) or []), running=terminate)
    return ok(f"{num_jobs} jobs asked to end")


@control_command(
    name="terminate",
    variadic="task_id",
    args=[("signal", str)],
    signature="<signal> [id1 [id2 [... [idN]]]]",
)
def terminate(
    state: Any,
    signal: str,  # noqa: ARG001 (Celery's signature)
    task_id: Any,
    **_: Any,
) -> dict[str, Any]:
    """Cancel rows, those of running jobs too."""
    return revoke(state, task_id, terminate=True)


@control_command(args=[("n", int)], signature="[N=1]")
def pool_grow(state: Any, **_: Any) -> dict[str, Any]:  # noqa: ARG001 (Celery's signature)
    """Refuse: a pool of threads does not change its size."""
    return nok(FIXED_POOL)


@control_command(args=[("n", int)], signature="[N=1]")
def pool_shrink(state: Any, **_: Any) -> dict[str, Any]:  # noqa: ARG001 (Celery's signature)
    """Refuse, as `pool_grow` does."""
    return nok(FIXED_POOL)


def make_app(settings: RelaySettings) -> Celery:
    """The app of a relay, which connects to nothing until its worker starts."""
    prepare_loaded()
    read_plainly()
    atomic_transport.register()
    app = Celery("shardline.relay", set_as_current=False, control=ExpiringControl)
    # A message may ask for the result of this task: it would stand for the job's, under any id.
    app.conf.update(settings.celery() | {"result_backend": "disabled://"})
    app.relay = Relay(settings)
    app.steps["worker"].add(RelayStep)
    app.steps["consumer"].add(IntakeConsumer)

    # No events and no result: Flower must show the id as the job, not as this task.
    @app.task(
        name=SUBMIT_TASK,
        shared=False,
        bind=True,
        typing=False,
        ignore_result=True,
        send_events=False,
        acks_late=True,
        base=IntakeTask,
    )
    def submit(task: Task, /, *_: object, **__: object) -> None:
        request = Context(vars(task.request))
        # Celery would follow this task, which ends now: they follow the job, when that ends.
        vars(task.request).update(dict.fromkeys(EMBEDDED))
        try:
            app.relay.submit(request)
        except (RetryError, HeldUp) as error:
            raise Reject(error, requeue=True) from error

    return app


with refusing():
    app = make_app(RelaySettings())
"""For `celery -A services.relay.app`."""
