"""Pipelines: who leads each one, in which epoch, and whether it can generate. Epochs come from here only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Interval, func, literal, select, update
from sqlalchemy.dialects.postgresql import insert

from shardline.tables import pipelines

LATELY_S = 3600.0
"""So long after its lease a pipeline counts as one that comes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePipeline:
    """A pipeline whose lease runs. It is ready while a generation can pass through every stage."""

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
    connection: Connection, pipeline: str, *, model: str, fingerprint: str, head: str, lease_s: float, held: int = 0
) -> int | None:
    """A starting head, or one that lost a stage: a new epoch, in which the pipeline is not ready yet.

    `held` is the last one that this head took; 0 of one that has just started: it follows a predecessor of the same
    worker's name at once. None: the pipeline is another head's, whose lease runs.
    """
    taken = {"model": model, "fingerprint": fingerprint, "head": head, "lease_until": _in(lease_s)}
    statement = insert(pipelines).values(id=pipeline, epoch=1, **taken)
    statement = statement.on_conflict_do_update(
        index_elements=[pipelines.c.id],
        set_={**taken, "epoch": pipelines.c.epoch + 1, "ready_at": None},
        where=(pipelines.c.lease_until <= func.now())
        | (pipelines.c.epoch == held if held else pipelines.c.head == head),
    )
    return connection.execute(statement.returning(pipelines.c.epoch)).scalar_one_or_none()


def holder(connection: Connection, pipeline: str) -> str | None:
    """The head that took it last."""
    return connection.scalar(select(pipelines.c.head).where(pipelines.c.id == pipeline))


def renew(connection: Connection, pipeline: str, epoch: int, lease_s: float) -> bool:
    """Keep the pipeline alive; False when another head took a higher epoch."""
    return _change(connection, pipeline, epoch, lease_until=_in(lease_s))


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
    """All stages are bound: jobs may be sent. `seats` sets how many are sent ahead, `kv_tokens` their length."""
    return _change(
        connection,
        pipeline,
        epoch,
        ready_at=func.coalesce(pipelines.c.ready_at, func.now()),
        seats=seats,
        stages=[dict(stage) for stage in stages],
        exact=exact,
        kv_tokens=kv_tokens,
    )


def unready(connection: Connection, pipeline: str, epoch: int) -> bool:
    """A stage was lost: no generation can pass now."""
    return _change(connection, pipeline, epoch, ready_at=None)


def release(connection: Connection, pipeline: str, epoch: int) -> bool:
    """The head goes: the pipeline is gone at once, not after its lease."""
    return _change(connection, pipeline, epoch, ready_at=None, lease_until=func.now())


def longest(connection: Connection) -> dict[str, int]:
    """By model, the tokens of the longest sequence that one of its pipelines holds, or held a short while ago: a
    restart makes nothing shorter. A model is missing while none of its pipelines has said so."""
    is_recent = pipelines.c.lease_until > _in(-LATELY_S)
    query = select(pipelines.c.model, func.max(pipelines.c.kv_tokens)).where(is_recent).group_by(pipelines.c.model)
    return {model: kv_tokens for model, kv_tokens in connection.execute(query) if kv_tokens is not None}


def live_pipelines(connection: Connection, model: str | None = None) -> list[LivePipeline]:
    """Pipelines whose lease runs, of one model or of all."""
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


def _change(connection: Connection, pipeline: str, epoch: int, **values: Any) -> bool:
    mine = update(pipelines).where(pipelines.c.id == pipeline, pipelines.c.epoch == epoch).values(**values)
    return connection.execute(mine).rowcount == 1


def _in(seconds: float) -> ColumnElement[Any]:
    return func.now() + func.make_interval(0, 0, 0, 0, 0, 0, literal(seconds), type_=Interval)
