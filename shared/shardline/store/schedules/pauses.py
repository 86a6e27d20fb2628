"""Pauses as rows: made, listed, removed; and the rule by which a job is under one.

A pause takes effect as its row is committed: no head claims a job that is under it. Relays then
take such jobs out of what waits to be sent, and put them back once the row is gone.
"""

from __future__ import annotations

from datetime import datetime

import msgspec
from sqlalchemy import Connection, text

from shardline.base.errors import Conflict, Invalid, NotFound
from shardline.contract.batches.batch import PREFIX
from shardline.contract.ids import parse_id
from shardline.contract.schedules.schedule_tables import (
    MAX_REASON_CHARS,
    MAX_TARGET_CHARS,
    PauseKind,
)

MAX_PAUSES = 1_000
"""Each is compared with each job that is sent or claimed."""

# Of a row of `jobs`: what it is paused by, or null. Costs nothing while there is no pause.
PAUSED_BY = """(
        SELECT min(kind || ' ' || target) FROM pauses WHERE CASE kind
            WHEN 'model' THEN target = jobs.model
            WHEN 'tenant' THEN target = jobs.tenant_id
            WHEN 'tag' THEN jobs.metadata ->> split_part(target, '=', 1)
                = substr(target, strpos(target, '=') + 1)
            ELSE EXISTS (
                SELECT FROM batch_lines WHERE job_id = coalesce(jobs.choice_of, jobs.id)
                    AND batch_id::text = target)
            END
    )"""

COUNT = text("SELECT count(*) FROM pauses WHERE (kind, target) <> (:kind, :target)")
PAUSE = text("""
INSERT INTO pauses (kind, target, reason) VALUES (:kind, :target, :reason)
ON CONFLICT (kind, target) DO UPDATE SET reason = excluded.reason
RETURNING kind, target, reason, created_at
""")
RESUME = text("DELETE FROM pauses WHERE kind = :kind AND target = :target RETURNING kind")
LIST = text("""
SELECT kind, target, reason, created_at FROM pauses ORDER BY created_at, kind, target LIMIT :limit
""")


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """A pause, which keeps the jobs of its target waiting."""

    kind: PauseKind
    target: str
    reason: str | None
    created_at: datetime


def pause(
    connection: Connection, kind: PauseKind, target: str, *, reason: str | None = None
) -> Pause:
    """Lets jobs wait from now on; those that run go on. A repeat changes the reason. Raises
    Invalid, and Conflict at MAX_PAUSES."""
    values = {"kind": str(kind), "target": _target(kind, target)}
    if reason is not None and not (len(reason) <= MAX_REASON_CHARS and "\0" not in reason):
        raise Invalid("reason", "it is too long", f"Write at most {MAX_REASON_CHARS} characters")
    if connection.scalar(COUNT, values) >= MAX_PAUSES:
        raise Conflict(f"there are {MAX_PAUSES} pauses, which is the limit; resume something")
    row = connection.execute(PAUSE, {**values, "reason": reason}).mappings().one()
    return Pause(**{**row, "kind": kind})


def resume(connection: Connection, kind: PauseKind, target: str) -> None:
    """Lets jobs run again. Raises NotFound, Invalid."""
    target = _target(kind, target)
    if connection.scalar(RESUME, {"kind": str(kind), "target": target}) is None:
        raise NotFound(f"the {kind} {target!r} is not paused")


def list_pauses(connection: Connection) -> list[Pause]:
    """All pauses, the oldest first; at most MAX_PAUSES."""
    rows = connection.execute(LIST, {"limit": MAX_PAUSES}).mappings()
    return [Pause(**{**row, "kind": PauseKind(row["kind"])}) for row in rows]


def kind_of(name: str) -> PauseKind:
    """Reads a kind as clients send it. Raises Invalid."""
    if name not in list(PauseKind):
        raise Invalid("kind", f"{name[:32]!r} is none", f"Use one of: {', '.join(PauseKind)}")
    return PauseKind(name)


def _target(kind: PauseKind, target: str) -> str:
    """Returns it as the table has it: a batch's UUID without OpenAI's prefix."""
    if not (1 <= len(target) <= MAX_TARGET_CHARS and target.isprintable()):
        remedy = f"Write 1 to {MAX_TARGET_CHARS} characters, all of them printable"
        raise Invalid("target", f"{target[:32]!r} cannot be one", remedy)
    if kind is PauseKind.TAG and target.find("=") < 1:
        raise Invalid("target", f"{target[:32]!r} is no tag", "Write KEY=VALUE of jobs' metadata")
    if kind is PauseKind.BATCH:
        return str(parse_id(target.removeprefix(PREFIX), "target"))
    return target
