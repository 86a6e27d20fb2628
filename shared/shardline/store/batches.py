"""Rows of `batches`: made, listed, cancelled, and taken by one gateway at a time. Knows no line.

A turn at a batch has a fence: what an older turn still wants to write finds another one, and writes
nothing.
Locks: the row of a batch, before those of its lines and jobs; SKIP LOCKED to take one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Connection, RowMapping, text

from shardline.base.errors import Conflict, Invalid, NotFound
from shardline.contract.batches.batch import BatchStatus, LineCounts
from shardline.contract.ids import new_id
from shardline.store.connection.encoding import dump
from shardline.store.files import add_part

LEASE_S = 30.0
"""Without a renewal in this time a turn has ended with its process."""

COLUMNS = """*, extract(epoch FROM expires_at - now())::float8 AS expires_in_s,
    extract(epoch FROM now() - created_at)::float8 AS age_s"""

INSERT = text(f"""
INSERT INTO batches (
    id, tenant_id, key_name, idempotency_key, endpoint, input_file_id, completion_window,
    output_expires_after_s, metadata, status, expires_at, num_lines, last_line, next_line,
    next_byte, first_open, due_at, fence)
VALUES (
    :id, :tenant, :key_name, :idempotency_key, :endpoint, :input_file_id, :completion_window,
    :output_expires_after_s, CAST(:metadata AS jsonb), 'validating',
    now() + make_interval(secs => :window_s), 0, 0, 1, 0, 1, now(), 0)
ON CONFLICT (tenant_id, idempotency_key) DO NOTHING RETURNING {COLUMNS}
""")  # noqa: S608 (a constant of ours)
REPEATED = text(f"""
SELECT {COLUMNS} FROM batches WHERE tenant_id = :tenant AND idempotency_key = :idempotency_key
""")  # noqa: S608 (a constant of ours)
GET = text(f"SELECT {COLUMNS} FROM batches WHERE id = :id AND tenant_id = :tenant")  # noqa: S608 (a constant of ours)
READ = text(f"SELECT {COLUMNS} FROM batches WHERE id = :id")  # noqa: S608 (a constant of ours)
# The limit is a literal, so that the planner walks batches_listing.
PAGE = f"""
SELECT {COLUMNS} FROM batches WHERE tenant_id = :tenant {{rules}}
ORDER BY created_at DESC, id DESC LIMIT {{limit}}
"""  # noqa: S608 (a constant of ours)
CANCEL = text(f"""
UPDATE batches SET status = 'cancelling', cancelling_at = now(), due_at = now(), fence = fence + 1
WHERE id = :id AND tenant_id = :tenant AND status IN ('validating', 'in_progress', 'finalizing')
RETURNING {COLUMNS}
""")  # noqa: S608 (a constant of ours)

TAKE = text(f"""
UPDATE batches SET due_at = now() + make_interval(secs => {LEASE_S}), fence = fence + 1
WHERE id = (
    SELECT id FROM batches WHERE due_at <= now() ORDER BY due_at LIMIT 1 FOR UPDATE SKIP LOCKED)
RETURNING {COLUMNS}
""")  # noqa: S608 (constants of ours)
RENEW = text(f"""
UPDATE batches SET due_at = now() + make_interval(secs => {LEASE_S})
WHERE id = :id AND fence = :fence RETURNING id
""")  # noqa: S608 (a constant of ours)
LEAVE = text("""
UPDATE batches SET due_at = now() + make_interval(secs => :pause_s)
WHERE id = :id AND fence = :fence AND due_at IS NOT NULL
""")
FAIL = text("""
UPDATE batches SET status = 'failed', failed_at = now(), due_at = NULL,
    errors = CAST(:errors AS jsonb)
WHERE id = :id AND fence = :fence AND status = 'validating' RETURNING id
""")
BEGIN = text("""
UPDATE batches SET status = 'in_progress', in_progress_at = now(), num_lines = :num_lines,
    last_line = :last_line, model = :model, output_file_id = :output_file_id
WHERE id = :id AND fence = :fence AND status = 'validating' RETURNING id
""")
GIVE_UP = text("""
UPDATE batches SET last_line = next_line - 1 WHERE id = :id AND fence = :fence RETURNING id
""")
COUNT = text("""
UPDATE batches SET settled = CAST(:settled AS jsonb), counts = CAST(:counts AS jsonb),
    first_open = :first_open, error_file_id = coalesce(error_file_id, :error_file_id)
WHERE id = :id AND fence = :fence RETURNING id
""")
END = text("""
UPDATE batches SET status = :status, finalizing_at = now(), due_at = NULL,
    completed_at = CASE WHEN :status = 'completed' THEN now() END,
    expired_at = CASE WHEN :status = 'expired' THEN now() END,
    cancelled_at = CASE WHEN :status = 'cancelled' THEN now() END
WHERE id = :id AND fence = :fence AND status IN ('in_progress', 'cancelling') RETURNING id
""")
EXPIRE_OUTPUT = text("""
UPDATE files SET expires_at = now() + make_interval(secs => output_expires_after_s)
FROM batches WHERE files.batch_id = batches.id AND batches.id = :id
    AND output_expires_after_s IS NOT NULL
""")


class TurnLost(Exception):
    """Another gateway has taken the batch, or it was cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBatch:
    """What a batch is made of. `window_s` is `completion_window` in seconds. Without a key's name
    its maker reads Postgres alone: its answers become rows too."""

    tenant: str
    key_name: str | None
    endpoint: str
    input_file_id: UUID
    completion_window: str
    window_s: float
    output_expires_after_s: int | None
    metadata: Mapping[str, Any]
    idempotency_key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """A batch as its row has it. Lines have numbers from 1."""

    id: UUID
    tenant: str
    key_name: str | None
    endpoint: str
    input_file_id: UUID
    completion_window: str
    status: BatchStatus
    metadata: Mapping[str, Any]
    model: str | None
    errors: Sequence[Mapping[str, Any]]
    output_file_id: UUID | None
    error_file_id: UUID | None
    created_at: datetime
    expires_at: datetime
    moments: Mapping[str, datetime | None]
    """Of its other states, by the names of their columns."""
    num_lines: int
    last_line: int
    """Its number, which counts blank lines too."""
    next_line: int
    """The first one that is no row."""
    next_byte: int
    """Where it begins in the input."""
    first_open: int
    settled: LineCounts
    """Of the lines before `first_open`, which have ended."""
    counts: LineCounts
    expires_in_s: float
    age_s: float
    """Both by Postgres's clock, as the row was read."""
    fence: int

    @property
    def is_answered_in_rows(self) -> bool:
        """Whether its maker came without an API key, and can ask no gateway for its answers."""
        return self.key_name is None

    @property
    def is_read(self) -> bool:
        """Whether each line of its file is a row."""
        return self.moments["in_progress_at"] is not None and self.next_line > self.last_line


MOMENTS = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


def insert_batch(connection: Connection, new: NewBatch) -> BatchRow:
    """Makes a batch, or finds the one that has the idempotency key. Raises Conflict where that one
    was made of something else."""
    values = {
        "id": new_id(),
        "tenant": new.tenant,
        "key_name": new.key_name,
        "idempotency_key": new.idempotency_key,
        "endpoint": new.endpoint,
        "input_file_id": new.input_file_id,
        "completion_window": new.completion_window,
        "output_expires_after_s": new.output_expires_after_s,
        "metadata": dump(new.metadata),
        "window_s": new.window_s,
    }
    row = connection.execute(INSERT, values).mappings().first()
    if row is not None:
        return _batch(row)
    key = {"tenant": new.tenant, "idempotency_key": new.idempotency_key}
    found = _batch(connection.execute(REPEATED, key).mappings().one())
    if (found.input_file_id, found.endpoint) != (new.input_file_id, new.endpoint):
        problem = f"batch batch_{found.id} has this idempotency key and another file or endpoint"
        raise Conflict(f"{problem}; use a new key")
    return found


def get_batch(connection: Connection, batch_id: UUID, *, tenant: str) -> BatchRow:
    """A batch of the tenant. Raises NotFound."""
    row = connection.execute(GET, {"id": batch_id, "tenant": tenant}).mappings().first()
    if row is None:
        raise NotFound(f"no batch has the id batch_{batch_id}")
    return _batch(row)


def read_batch(connection: Connection, batch_id: UUID) -> BatchRow | None:
    """Returns a batch of any tenant."""
    row = connection.execute(READ, {"id": batch_id}).mappings().first()
    return None if row is None else _batch(row)


def list_batches(
    connection: Connection, *, tenant: str, limit: int, after: UUID | None
) -> tuple[list[BatchRow], bool]:
    """Returns a page of batches behind `after`, newest first, and whether there are more. Raises
    Invalid for an `after` that is not there."""
    values: dict[str, Any] = {"tenant": tenant}
    rules = ""
    if after is not None:
        last = connection.execute(GET, {"id": after, "tenant": tenant}).mappings().first()
        if last is None:
            raise Invalid("after", f"there is no batch batch_{after}", "List from the start")
        rules = "AND (created_at, id) < (:at, :after)"
        values |= {"at": last["created_at"], "after": after}
    query = text(PAGE.format(rules=rules, limit=limit + 1))
    found = [_batch(row) for row in connection.execute(query, values).mappings()]
    return found[:limit], len(found) > limit


def cancel_batch(connection: Connection, batch_id: UUID, *, tenant: str) -> BatchRow:
    """Asks for the end of a batch; asked again, it stays as it is. Raises NotFound, and Conflict
    where it has ended otherwise."""
    row = connection.execute(CANCEL, {"id": batch_id, "tenant": tenant}).mappings().first()
    if row is not None:
        return _batch(row)
    found = get_batch(connection, batch_id, tenant=tenant)
    if found.status not in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
        raise Conflict(f"the batch has ended and is {found.status}; nothing is left to cancel")
    return found


def take_batch(connection: Connection) -> BatchRow | None:
    """Begins a turn at a batch that is due, for LEASE_S; None where there is none."""
    row = connection.execute(TAKE).mappings().first()
    return None if row is None else _batch(row)


def renew(connection: Connection, batch: BatchRow) -> None:
    """Goes on with a turn for LEASE_S more. Raises TurnLost."""
    _hold(connection.scalar(RENEW, _turn(batch)))


def leave(connection: Connection, batch: BatchRow, *, pause_s: float) -> None:
    """Ends a turn at a batch that is due again after a pause."""
    connection.execute(LEAVE, {**_turn(batch), "pause_s": pause_s})


def fail(connection: Connection, batch: BatchRow, errors: Sequence[Mapping[str, Any]]) -> None:
    """Ends a batch with an invalid file. Raises TurnLost."""
    _hold(connection.scalar(FAIL, {**_turn(batch), "errors": dump(errors)}))


def begin_lines(
    connection: Connection, batch: BatchRow, *, num_lines: int, last_line: int, model: str | None
) -> None:
    """Begins to make lines rows: from now on the output can be read. Raises TurnLost."""
    output_id = new_id()
    about = {"num_lines": num_lines, "last_line": last_line, "model": model}
    _hold(connection.scalar(BEGIN, {**_turn(batch), **about, "output_file_id": output_id}))
    add_part(connection, output_id, tenant=batch.tenant, batch_id=batch.id, part="output")


def give_up_lines(connection: Connection, batch: BatchRow) -> None:
    """Has a batch end with the lines that are rows: its file was deleted. Raises TurnLost."""
    _hold(connection.scalar(GIVE_UP, _turn(batch)))


def write_counts(
    connection: Connection,
    batch: BatchRow,
    *,
    settled: LineCounts,
    counts: LineCounts,
    first_open: int,
) -> None:
    """Writes how many lines have ended. The first one that failed brings the file of errors. Raises
    TurnLost."""
    error_id = new_id() if counts.failed and batch.error_file_id is None else None
    values = {
        "settled": dump(msgspec.to_builtins(settled)),
        "counts": dump(msgspec.to_builtins(counts)),
        "first_open": first_open,
        "error_file_id": error_id,
    }
    _hold(connection.scalar(COUNT, {**_turn(batch), **values}))
    if error_id is not None:
        add_part(connection, error_id, tenant=batch.tenant, batch_id=batch.id, part="error")


def end_batch(connection: Connection, batch: BatchRow, status: BatchStatus) -> None:
    """Ends a batch after all of its lines. Raises TurnLost."""
    _hold(connection.scalar(END, {**_turn(batch), "status": status.value}))
    connection.execute(EXPIRE_OUTPUT, {"id": batch.id})


def _turn(batch: BatchRow) -> dict[str, Any]:
    return {"id": batch.id, "fence": batch.fence}


def _hold(found: UUID | None) -> None:
    if found is None:
        raise TurnLost


def _batch(row: RowMapping) -> BatchRow:
    same = {
        name: row[name]
        for name in BatchRow.__dataclass_fields__
        if name not in ("tenant", "status", "errors", "moments", "settled", "counts")
    }
    return BatchRow(
        **same,
        tenant=row["tenant_id"],
        status=BatchStatus(row["status"]),
        errors=row["errors"] or (),
        moments={name: row[name] for name in MOMENTS},
        settled=msgspec.convert(row["settled"], LineCounts),
        counts=msgspec.convert(row["counts"], LineCounts),
    )
