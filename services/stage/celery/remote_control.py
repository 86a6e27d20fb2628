"""Remote-control commands of a stage. Cancel goes through the row: Celery's own revoke would
remember ids for ever and lose a job that is requeued."""

from __future__ import annotations

from typing import Any

from celery.utils.functional import maybe_list
from celery.worker.control import control_command, inspect_command

from shardline.contract.queues import TRACE_COMMAND


@control_command(
    variadic="task_id",
    signature="[id1 [id2 [... [idN]]]]",
    args=[("task_id", str), ("terminate", bool), ("signal", str)],
)
def revoke(state: Any, task_id: Any, terminate: bool = False, **_: Any) -> dict[str, Any]:
    """Stop running jobs when `terminate` is set. Queued ones are the relays' business, which write
    the rows."""
    ids = [str(one) for one in maybe_list(task_id) or []]
    stopped = state.app.shardline.delivery_handler.cancel(ids) if terminate else 0
    return {"ok": f"{stopped} of {len(ids)} jobs run here and are being cancelled"}


@control_command(
    variadic="task_id",
    signature="<signal> [id1 [id2 [... [idN]]]]",
    args=[("signal", str), ("task_id", str)],
)
def terminate(state: Any, task_id: Any, **_: Any) -> dict[str, Any]:
    """Revoke with terminate."""
    return revoke(state, task_id, terminate=True)


@inspect_command()
def stage(state: Any, **_: Any) -> dict[str, Any]:
    """This stage: layers, device, pipeline, epoch, KV blocks in use, steps done."""
    return dict(state.app.shardline.describe())


@inspect_command(name=TRACE_COMMAND)
def trace(state: Any, **_: Any) -> dict[str, Any]:
    """This stage's last steps, for `shardline trace`."""
    return dict(state.app.shardline.trace())
