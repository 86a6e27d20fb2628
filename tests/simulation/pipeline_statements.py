"""`shardline.store.pipelines` over tables in memory; see `statements` for the rest of the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.simulation.rows import Connection, PipelineRow


def take_epoch(
    connection: Connection, pipeline: str, *, model: str, fingerprint: str, head: str, lease_s: float, held: int = 0
) -> int | None:
    """See shardline.store.pipelines."""
    rows = connection.tables.pipelines
    before = rows.get(pipeline)
    if (
        before is not None
        and before.lease_s > connection.now_s
        and (before.epoch != held if held else before.head != head)
    ):
        return None
    rows[pipeline] = PipelineRow(
        model=model,
        epoch=before.epoch + 1 if before else 1,
        head=head,
        lease_s=connection.now_s + lease_s,
        seats=before.seats if before else 0,
        exact=before.exact if before else False,
        kv_tokens=before.kv_tokens if before else None,
    )
    return rows[pipeline].epoch


def renew(connection: Connection, pipeline: str, epoch: int, lease_s: float) -> bool:
    """See shardline.store.pipelines."""
    row = _of_epoch(connection, pipeline, epoch)
    if row is not None:
        row.lease_s = connection.now_s + lease_s
    return row is not None


def ready(
    connection: Connection,
    pipeline: str,
    epoch: int,
    *,
    seats: int,
    stages: Sequence[Mapping[str, Any]],
    exact: bool,
    kv_tokens: int | None = None,
) -> bool:
    """See shardline.store.pipelines."""
    row = _of_epoch(connection, pipeline, epoch)
    if row is not None:
        row.ready_s = connection.now_s if row.ready_s is None else row.ready_s
        row.seats, row.exact, row.kv_tokens = seats, exact, kv_tokens
    return row is not None


def unready(connection: Connection, pipeline: str, epoch: int) -> bool:
    """See shardline.store.pipelines."""
    row = _of_epoch(connection, pipeline, epoch)
    if row is not None:
        row.ready_s = None
    return row is not None


def release(connection: Connection, pipeline: str, epoch: int) -> bool:
    """See shardline.store.pipelines."""
    row = _of_epoch(connection, pipeline, epoch)
    if row is not None:
        row.ready_s, row.lease_s = None, connection.now_s
    return row is not None


def holder(connection: Connection, pipeline: str) -> str | None:
    """See shardline.store.pipelines."""
    row = connection.tables.pipelines.get(pipeline)
    return row.head if row else None


def _of_epoch(connection: Connection, pipeline: str, epoch: int) -> PipelineRow | None:
    row = connection.tables.pipelines.get(pipeline)
    return row if row is not None and row.epoch == epoch else None
