"""The log of administrative acts: who acts in a transaction, and what was done. Triggers of the
migrations write it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, text

from shardline.base.errors import Invalid
from shardline.contract.job_filter import JobFilter
from shardline.store.connection.encoding import dump

MAX_LISTED = 1_000
MAX_DELETED = 1_000
"""In a transaction."""

ACT_AS = text("SELECT set_config('shardline.actor', :actor, true)")
NOTE_JOBS = text("""
SELECT shardline_audit_jobs(:known, :act, :tenant, CAST(:asked AS json), :num_changed)
""")
LIST = """
SELECT id, at, actor, role_name AS role, tenant_id AS tenant, act, object_kind, object_id, change
FROM audit WHERE {rules}
ORDER BY at DESC, id DESC LIMIT :limit
"""
RULES = {
    "since": "at >= :since",
    "actor": "actor = :actor",
    "act": "act = :act",
    "after": "(at, id) < (SELECT at, id FROM audit WHERE id = :after)",
}
EXISTS = text("SELECT true FROM audit WHERE id = :after")
DELETE = text(f"""
DELETE FROM audit WHERE id = ANY(ARRAY(
    SELECT id FROM audit WHERE at < now() - make_interval(secs => :age_s)
    ORDER BY at, id LIMIT {MAX_DELETED}))
""")  # noqa: S608 (a constant of ours)

Answer = TypeVar("Answer")


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One act."""

    id: int
    at: datetime
    actor: str
    """As reported by the door: `key …`, `cli …`; else `role …`."""
    role: str
    """Of Postgres, that connected."""
    tenant: str | None
    act: str
    object_kind: str
    object_id: str
    change: dict[str, Any]


class AuditQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which acts are meant: all that is given must hold."""

    since: datetime | None = None
    actor: str | None = None
    act: str | None = None
    after: int | None = None
    """The id of the last one that is known: those before it."""


def act_as(connection: Connection, actor: str) -> None:
    """Sets the actor of this transaction."""
    connection.execute(ACT_AS, {"actor": actor})


def acting(actor: str, question: Callable[[Connection], Answer]) -> Callable[[Connection], Answer]:
    """Returns the question, asked by this actor."""

    def ask(connection: Connection) -> Answer:
        act_as(connection, actor)
        return question(connection)

    return ask


def note_jobs(
    connection: Connection,
    act: str,
    where: JobFilter,
    num_changed: int,
    *,
    priority: int | None,
    known: int | None,
) -> int:
    """Notes how many jobs an act has changed so far, in the row `known` if there is one. Returns
    the row's id."""
    asked = {name: value for name, value in msgspec.to_builtins(where).items() if value is not None}
    if where.ids is not None:
        asked["ids"] = len(where.ids)
    if priority is not None:
        asked["priority"] = priority
    values = {
        "known": known,
        "act": act,
        "tenant": where.tenant,
        "asked": dump(asked),
        "num_changed": num_changed,
    }
    return int(connection.execute(NOTE_JOBS, values).scalar_one())


def list_acts(
    connection: Connection, asked: AuditQuery, *, limit: int
) -> tuple[list[AuditEntry], bool]:
    """Returns a page, the newest act first, and whether there are more. Raises Invalid for an
    `after` that is not there."""
    given = {name: value for name, value in msgspec.structs.asdict(asked).items() if value}
    if asked.after is not None and not connection.scalar(EXISTS, {"after": asked.after}):
        raise Invalid("after", f"no act has the id {asked.after}", "List from the start")
    rules = " AND ".join(RULES[name] for name in given) or "true"
    rows = connection.execute(text(LIST.format(rules=rules)), {**given, "limit": limit + 1})
    found = [AuditEntry(**row) for row in rows.mappings()]
    return found[:limit], len(found) > limit


def delete_old(connection: Connection, *, age_s: float) -> int:
    """Deletes up to MAX_DELETED acts that are older. Returns how many."""
    return connection.execute(DELETE, {"age_s": age_s}).rowcount
