"""Twins of the statements about pipelines and models; see `statements` for those about jobs."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy.sql import Executable

from shardline.store import models, pipelines
from tests.simulation.rows import PipelineRow, Rows, Tables, Twin

# shardline.store.pipelines
# -------------------------------------------------------------------------------------------


def take_epoch(
    tables: Tables,
    *,
    pipeline: str,
    model: str,
    fingerprint: str,
    head: str,
    lease_s: float,
    held: int,
) -> Rows:
    """Of a row that is free, of the epoch that is held, or of the head's own name."""
    before = tables.pipelines.get(pipeline)
    if before is not None and before.lease_s > tables.now_s:
        is_own = before.epoch == held or (held == 0 and before.head == head)
        if not is_own:
            return []
    row = tables.pipelines[pipeline] = PipelineRow(
        model=model,
        epoch=before.epoch + 1 if before else 1,
        head=head,
        lease_s=tables.now_s + lease_s,
        seats=before.seats if before else 0,
        exact=before.exact if before else False,
        kv_tokens=before.kv_tokens if before else None,
    )
    return [{"epoch": row.epoch}]


def holder(tables: Tables, *, pipeline: str) -> Rows:
    """The head that took it last."""
    row = tables.pipelines.get(pipeline)
    return [] if row is None else [{"head": row.head}]


def renew(tables: Tables, *, pipeline: str, epoch: int, lease_s: float) -> int:
    """Its lease."""
    row = _of_epoch(tables, pipeline, epoch)
    if row is not None:
        row.lease_s = tables.now_s + lease_s
    return int(row is not None)


def ready(
    tables: Tables,
    *,
    pipeline: str,
    epoch: int,
    seats: int,
    stages: str,
    exact: bool,
    kv_tokens: int,
) -> int:
    """All stages are bound."""
    row = _of_epoch(tables, pipeline, epoch)
    if row is not None:
        row.ready_s = tables.now_s if row.ready_s is None else row.ready_s
        row.seats = seats
        row.exact = exact
        row.kv_tokens = kv_tokens
    return int(row is not None)


def unready(tables: Tables, *, pipeline: str, epoch: int) -> int:
    """A stage was lost."""
    row = _of_epoch(tables, pipeline, epoch)
    if row is not None:
        row.ready_s = None
    return int(row is not None)


def release(tables: Tables, *, pipeline: str, epoch: int) -> int:
    """The head goes."""
    row = _of_epoch(tables, pipeline, epoch)
    if row is not None:
        row.ready_s = None
        row.lease_s = tables.now_s
    return int(row is not None)


def longest(tables: Tables) -> Rows:
    """By model, of those whose lease ran of late."""
    recent = [
        row for row in tables.pipelines.values() if row.lease_s > tables.now_s - pipelines.LATELY_S
    ]
    most: dict[str, int] = {}
    for row in recent:
        if row.kv_tokens is not None:
            most[row.model] = max(row.kv_tokens, most.get(row.model, 0))
    return [{"model": model, "kv_tokens": kv_tokens} for model, kv_tokens in most.items()]


def _of_epoch(tables: Tables, pipeline: str, epoch: int) -> PipelineRow | None:
    row = tables.pipelines.get(pipeline)
    return row if row is not None and row.epoch == epoch else None


# shardline.store.models
# ----------------------------------------------------------------------------------------------


def register(tables: Tables, **row: Any) -> int:
    """The newest word counts."""
    tables.models[row["name"]] = {**row, "updated_at": datetime.fromtimestamp(tables.now_s, UTC)}
    return 1


def model(tables: Tables, *, name: str) -> Rows:
    """One whole row."""
    return [dict(tables.models[name])] if name in tables.models else []


def is_registered(tables: Tables, *, name: str) -> Rows:
    """The name alone."""
    return [{"name": name}] if name in tables.models else []


def versions(tables: Tables) -> Rows:
    """Fingerprints by name."""
    return [
        {"name": name, "fingerprint": row["fingerprint"]} for name, row in tables.models.items()
    ]


def adapters(tables: Tables) -> Rows:
    """No head has any."""
    return [{"name": name, "adapters": {}} for name in tables.models]


TWINS: Mapping[Executable, Twin] = {
    pipelines.TAKE_EPOCH: take_epoch,
    pipelines.HOLDER: holder,
    pipelines.RENEW: renew,
    pipelines.READY: ready,
    pipelines.UNREADY: unready,
    pipelines.RELEASE: release,
    pipelines.LONGEST: longest,
    models.REGISTER: register,
    models.IS_REGISTERED: is_registered,
    models.MODEL: model,
    models.VERSIONS: versions,
    models.ADAPTERS: adapters,
}
