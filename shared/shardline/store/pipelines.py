"""Pipelines: who leads each one, in which epoch, and whether it can generate. Epochs come from here
only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, TextClause, func, select, text

from shardline.contract.tables import pipelines
from shardline.store.connection.encoding import dump

LATELY_S = 3600.0
"""So long after its lease a pipeline counts as one that comes back."""

TAKE_EPOCH = text("""
INSERT INTO pipelines (id, model, fingerprint, epoch, head, lease_until)
VALUES (:pipeline, :model, :fingerprint, 1, :head, now() + make_interval(secs => :lease_s))
ON CONFLICT (id) DO UPDATE SET model = excluded.model, fingerprint = excluded.fingerprint,
    head = excluded.head, lease_until = excluded.lease_until,
    epoch = pipelines.epoch + 1, ready_at = NULL
-- No epoch is 0: a head that holds none is known by its name.
WHERE pipelines.lease_until <= now() OR pipelines.epoch = :held
    OR (:held = 0 AND pipelines.head = excluded.head)
RETURNING pipelines.epoch
""")

HOLDER = text("SELECT head FROM pipelines WHERE id = :pipeline")

RENEW = text("""
UPDATE pipelines SET lease_until = now() + make_interval(secs => :lease_s)
WHERE id = :pipeline AND epoch = :epoch
""")

READY = text("""
UPDATE pipelines SET ready_at = coalesce(ready_at, now()), seats = :seats,
    stages = CAST(:stages AS jsonb), exact = :exact, kv_tokens = :kv_tokens
WHERE id = :pipeline AND epoch = :epoch
""")

UNREADY = text("UPDATE pipelines SET ready_at = NULL WHERE id = :pipeline AND epoch = :epoch")

RELEASE = text(
    "UPDATE pipelines SET ready_at = NULL, lease_until = now() "
    "WHERE id = :pipeline AND epoch = :epoch"
)

LONGEST = text(f"""
SELECT model, max(kv_tokens) AS kv_tokens FROM pipelines
WHERE lease_until > now() - make_interval(secs => {LATELY_S}) AND kv_tokens IS NOT NULL
GROUP BY model
""")  # noqa: S608 (a constant of ours)


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePipeline:
    """A pipeline with a running lease. It is ready while a generation can pass through every
    stage."""

    id: str
    model: str
    fingerprint: str
    epoch: int
    head: str
    ready: bool
    seats: int
    exact: bool
    kv_tokens: int | None
    stages: tuple[dict[str, Any], ...]


def take_epoch(
    connection: Connection,
    pipeline: str,
    *,
    model: str,
    fingerprint: str,
    head: str,
    lease_s: float,
    held: int = 0,
) -> int | None:
    """Gives a starting head, or one that lost a stage, a new epoch, in which the pipeline is not
    ready yet.

    `held` is the last one that this head took; 0 of one that has just started: it follows a
    predecessor of the same worker's name at once. None: the pipeline is another head's, with a
    running lease.
    """
    taken = {
        "pipeline": pipeline,
        "model": model,
        "fingerprint": fingerprint,
        "head": head,
        "lease_s": lease_s,
    }
    epoch: int | None = connection.scalar(TAKE_EPOCH, {**taken, "held": held})
    return epoch


def holder(connection: Connection, pipeline: str) -> str | None:
    """The head that took it last."""
    head: str | None = connection.scalar(HOLDER, {"pipeline": pipeline})
    return head


def renew(connection: Connection, pipeline: str, epoch: int, lease_s: float) -> bool:
    """Keep the pipeline alive; False when another head took a higher epoch."""
    return _change(connection, RENEW, pipeline, epoch, lease_s=lease_s)


def ready(
    connection: Connection,
    pipeline: str,
    epoch: int,
    *,
    seats: int,
    stages: Sequence[Mapping[str, Any]],
    exact: bool,
    kv_tokens: int,
) -> bool:
    """All stages are bound: jobs may be sent. `seats` sets how many are sent ahead, `kv_tokens`
    their length."""
    return _change(
        connection,
        READY,
        pipeline,
        epoch,
        seats=seats,
        stages=dump(stages),
        exact=exact,
        kv_tokens=kv_tokens,
    )


def unready(connection: Connection, pipeline: str, epoch: int) -> bool:
    """A stage was lost: no generation can pass now."""
    return _change(connection, UNREADY, pipeline, epoch)


def release(connection: Connection, pipeline: str, epoch: int) -> bool:
    """The head goes: the pipeline is gone at once, not after its lease."""
    return _change(connection, RELEASE, pipeline, epoch)


def longest(connection: Connection) -> dict[str, int]:
    """Returns, by model, the tokens of the longest sequence that one of its pipelines holds, or
    held a short while ago: a restart makes nothing shorter. A model is missing while none of its
    pipelines has reported one."""
    return {row.model: row.kv_tokens for row in connection.execute(LONGEST)}


def live_pipelines(connection: Connection, model: str | None = None) -> list[LivePipeline]:
    """Returns pipelines with a running lease, of one model or of all."""
    query = select(pipelines).where(pipelines.c.lease_until > func.now()).order_by(pipelines.c.id)
    if model is not None:
        query = query.where(pipelines.c.model == model)
    return [
        LivePipeline(
            id=row.id,
            model=row.model,
            fingerprint=row.fingerprint,
            epoch=row.epoch,
            head=row.head,
            ready=row.ready_at is not None,
            seats=row.seats,
            exact=row.exact,
            kv_tokens=row.kv_tokens,
            stages=tuple(row.stages),
        )
        for row in connection.execute(query)
    ]


def num_ready(connection: Connection, model: str) -> int:
    """How many pipelines of this model can generate now."""
    is_ready = pipelines.c.ready_at.is_not(None) & (pipelines.c.lease_until > func.now())
    query = select(func.count()).select_from(pipelines).where(pipelines.c.model == model, is_ready)
    return int(connection.scalar(query) or 0)


def _change(
    connection: Connection, statement: TextClause, pipeline: str, epoch: int, **values: Any
) -> bool:
    return (
        connection.execute(statement, {"pipeline": pipeline, "epoch": epoch, **values}).rowcount
        == 1
    )
