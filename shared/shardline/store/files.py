"""Rows of `files` and their chunks: written while an upload comes in, read a chunk at a time. Knows
no form of an upload.

Locks: the row of a file, one in a transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, RowMapping, text

from shardline.base.errors import Conflict, Invalid, NotFound
from shardline.contract.ids import new_id

COLUMNS = "id, tenant_id, filename, purpose, bytes, created_at, expires_at, batch_id, part"
IS_THERE = "uploaded_at IS NOT NULL AND (expires_at IS NULL OR expires_at > now())"

BEGIN = text("""
INSERT INTO files (id, tenant_id, filename, purpose, bytes)
VALUES (:id, :tenant, :filename, :purpose, 0)
""")
STORED = text("""
SELECT coalesce(sum(bytes), 0)::bigint AS num_bytes, shardline_bytes_left(:tenant) AS left
FROM files WHERE tenant_id = :tenant AND batch_id IS NULL
""")
GROW = text("""
UPDATE files SET bytes = bytes + :num_bytes WHERE id = :id AND uploaded_at IS NULL RETURNING id
""")
ADD_CHUNK = text(
    "INSERT INTO file_chunks (file_id, number, content) VALUES (:id, :number, :content)"
)
END = text(f"""
UPDATE files SET uploaded_at = now(), created_at = now(), filename = :filename,
    purpose = :purpose, expires_at = now() + make_interval(secs => :expires_after_s)
WHERE id = :id AND uploaded_at IS NULL RETURNING {COLUMNS}
""")  # noqa: S608 (a constant of ours)
DROP_UPLOAD = text("DELETE FROM files WHERE id = :id AND uploaded_at IS NULL")

GET = text(f"""
SELECT {COLUMNS} FROM files WHERE id = :id AND tenant_id = :tenant AND {IS_THERE}
""")  # noqa: S608 (constants of ours)
IS_READ = """EXISTS (
    SELECT FROM batches WHERE input_file_id = files.id AND due_at IS NOT NULL
        AND (in_progress_at IS NULL OR next_line <= last_line))"""
"""By a batch that has not made rows of all its lines."""

DELETE = text(f"""
DELETE FROM files WHERE id = :id AND tenant_id = :tenant AND {IS_THERE} AND NOT {IS_READ}
RETURNING id
""")  # noqa: S608 (constants of ours)
# Of a part that was deleted there is nothing to answer.
ADD_ANSWERS = text("""
INSERT INTO file_chunks (file_id, number, content)
SELECT id, :number, :content FROM files WHERE id = :id RETURNING number
""")
LAST_CHUNK = text("SELECT max(number) FROM file_chunks WHERE file_id = :id")
NEXT_CHUNK = text("""
SELECT number, content FROM file_chunks WHERE file_id = :id AND number > :after
ORDER BY number LIMIT 1
""")
CHUNK = text("SELECT content FROM file_chunks WHERE file_id = :id AND number = :number")
PLACE = text("SELECT created_at FROM files WHERE id = :id AND tenant_id = :tenant")
# The limit is a literal, so that the planner walks files_listing.
PAGE = f"""
SELECT {COLUMNS} FROM files WHERE tenant_id = :tenant AND {IS_THERE} {{rules}}
ORDER BY created_at {{order}}, id {{order}} LIMIT {{limit}}
"""  # noqa: S608 (constants of ours)
NEW_PART = text("""
INSERT INTO files (id, tenant_id, filename, purpose, bytes, uploaded_at, batch_id, part)
VALUES (:id, :tenant, :filename, :purpose, 0, now(), :batch_id, :part)
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRow:
    """A file that is whole. One with `part` has no chunks: its content are lines of its batch."""

    id: UUID
    tenant: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: datetime
    expires_at: datetime | None
    batch_id: UUID | None
    part: str | None


def begin_upload(connection: Connection, *, tenant: str) -> UUID:
    """Makes a file that is not visible before `end_upload`."""
    file_id = new_id()
    values = {"id": file_id, "tenant": tenant, "filename": "upload", "purpose": "upload"}
    connection.execute(BEGIN, values)
    return file_id


def add_chunk(
    connection: Connection,
    file_id: UUID,
    number: int,
    content: bytes,
    *,
    tenant: str,
    max_stored_bytes: int,
) -> None:
    """Adds the next chunk, counted from 0. Raises Invalid where it is one too many for the tenant,
    and Conflict where the upload was given up."""
    stored = connection.execute(STORED, {"tenant": tenant}).one()
    if stored.left is not None:
        max_stored_bytes = min(max_stored_bytes, stored.num_bytes + stored.left)
    if stored.num_bytes + len(content) > max_stored_bytes:
        problem = (
            f"the files of this tenant have {stored.num_bytes} bytes; "
            f"{max_stored_bytes} is the limit"
        )
        raise Invalid("file", problem, "Delete some that are not needed any more")
    if connection.scalar(GROW, {"id": file_id, "num_bytes": len(content)}) is None:
        raise Conflict("the upload took too long; send the file again")
    connection.execute(ADD_CHUNK, {"id": file_id, "number": number, "content": content})


def end_upload(
    connection: Connection,
    file_id: UUID,
    *,
    filename: str,
    purpose: str,
    expires_after_s: int | None,
) -> FileRow:
    """Makes an upload a file. Raises Conflict where it was given up."""
    values = {"filename": filename, "purpose": purpose, "expires_after_s": expires_after_s}
    row = connection.execute(END, {"id": file_id, **values}).mappings().first()
    if row is None:
        raise Conflict("the upload took too long; send the file again")
    return _file(row)


def drop_upload(connection: Connection, file_id: UUID) -> None:
    """Gives up an upload that has not ended."""
    connection.execute(DROP_UPLOAD, {"id": file_id})


def add_part(
    connection: Connection, file_id: UUID, *, tenant: str, batch_id: UUID, part: str
) -> None:
    """Makes the file of a batch's lines that succeeded, or of the others."""
    values = {"filename": f"batch_{batch_id}_{part}.jsonl", "purpose": "batch_output"}
    about = {"id": file_id, "tenant": tenant, "batch_id": batch_id, "part": part}
    connection.execute(NEW_PART, {**about, **values})


def add_answers(connection: Connection, file_id: UUID, *, last_line: int, content: bytes) -> bool:
    """Adds lines to a batch's part as a chunk with the number of the last line. Returns
    whether the part is still there."""
    values = {"id": file_id, "number": last_line, "content": content}
    return connection.scalar(ADD_ANSWERS, values) is not None


def last_answered(connection: Connection, file_id: UUID) -> int:
    """The last line of a batch's part that is in a chunk; 0 where none is."""
    return connection.scalar(LAST_CHUNK, {"id": file_id}) or 0


def next_answers(connection: Connection, file_id: UUID, *, after: int) -> tuple[int, bytes] | None:
    """The next chunk of a batch's part behind a line, with its last line; None at the end."""
    row = connection.execute(NEXT_CHUNK, {"id": file_id, "after": after}).first()
    return None if row is None else (row.number, row.content)


def find_file(connection: Connection, file_id: UUID, *, tenant: str) -> FileRow | None:
    """A file of the tenant; None where there is none, or it has expired."""
    row = connection.execute(GET, {"id": file_id, "tenant": tenant}).mappings().first()
    return None if row is None else _file(row)


def get_file(connection: Connection, file_id: UUID, *, tenant: str) -> FileRow:
    """A file of the tenant. Raises NotFound."""
    found = find_file(connection, file_id, tenant=tenant)
    if found is None:
        raise _not_found(file_id)
    return found


def delete_file(connection: Connection, file_id: UUID, *, tenant: str) -> None:
    """Deletes a file with its chunks. Raises NotFound, and Conflict while a batch reads it."""
    if connection.scalar(DELETE, {"id": file_id, "tenant": tenant}) is None:
        get_file(connection, file_id, tenant=tenant)
        raise Conflict("a batch reads the file; delete it when the batch is in progress, or cancel")


def list_files(
    connection: Connection,
    *,
    tenant: str,
    purpose: str | None,
    limit: int,
    after: UUID | None,
    is_ascending: bool,
) -> tuple[Sequence[FileRow], bool]:
    """Returns a page of files behind `after`, and whether there are more. Raises Invalid for an
    `after` that is not there."""
    values: dict[str, Any] = {"tenant": tenant, "purpose": purpose}
    rules = "" if purpose is None else "AND purpose = :purpose"
    if after is not None:
        at = connection.scalar(PLACE, {"id": after, "tenant": tenant})
        if at is None:
            problem = f"there is no file file-{after}; it may have been deleted"
            raise Invalid("after", problem, "List from the start")
        rules += f" AND (created_at, id) {'>' if is_ascending else '<'} (:at, :after)"
        values |= {"at": at, "after": after}
    order = "ASC" if is_ascending else "DESC"
    query = text(PAGE.format(rules=rules, order=order, limit=limit + 1))
    found = [_file(row) for row in connection.execute(query, values).mappings()]
    return found[:limit], len(found) > limit


def read_chunk(connection: Connection, file_id: UUID, number: int) -> bytes | None:
    """A chunk of a file; None behind the last one, or of a file that is gone."""
    content: bytes | None = connection.scalar(CHUNK, {"id": file_id, "number": number})
    return content


def _file(row: RowMapping) -> FileRow:
    return FileRow(
        id=row["id"],
        tenant=row["tenant_id"],
        filename=row["filename"],
        purpose=row["purpose"],
        num_bytes=row["bytes"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        batch_id=row["batch_id"],
        part=row["part"],
    )


def _not_found(file_id: UUID) -> NotFound:
    return NotFound(f"no file has the id file-{file_id}")
