"""Batches through Postgres alone: rows that any gateway, or a keeper of batches without a door,
goes on with. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from uuid import UUID

from shardline.base.errors import Invalid, NotFound
from shardline.cli.batches.batch_door import BatchState, key_of, problem_of
from shardline.cli.database import Ask
from shardline.contract.batches.batch import (
    CHUNK_BYTES,
    FILE_PREFIX,
    PREFIX,
    PURPOSE,
    window_seconds,
)
from shardline.contract.batches.batch_tables import MAX_FILENAME_CHARS
from shardline.contract.ids import parse_id
from shardline.contract.job import DEFAULT_TENANT
from shardline.store import batches, files
from shardline.store.batches import BatchRow, NewBatch

UNLIMITED_BYTES = 1 << 62
"""A gateway's limits are for its callers. The tenant's quota holds here too."""


class DatabaseDoor:
    """Rows of files and batches."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def upload(self, source: Path) -> str:
        """Stores a file, a chunk in a transaction: it is visible after the last one."""
        file_id = self._ask(partial(files.begin_upload, tenant=DEFAULT_TENANT))
        with source.open("rb") as content:
            number = 0
            while chunk := content.read(CHUNK_BYTES):
                add = partial(
                    files.add_chunk,
                    file_id=file_id,
                    number=number,
                    content=chunk,
                    tenant=DEFAULT_TENANT,
                    max_stored_bytes=UNLIMITED_BYTES,
                )
                self._ask(add)
                number += 1
        # A name may have bytes that are no text.
        name = source.name.encode(errors="replace").decode()[-MAX_FILENAME_CHARS:]
        end = partial(
            files.end_upload,
            file_id=file_id,
            filename=name,
            purpose=PURPOSE,
            expires_after_s=None,
        )
        self._ask(end)
        return f"{FILE_PREFIX}{file_id}"

    def begin(self, file_id: str, *, endpoint: str, window: str) -> BatchState:
        """Makes a batch of a file, or finds the one that was made of it. Raises Invalid."""
        new = NewBatch(
            tenant=DEFAULT_TENANT,
            key_name=None,
            endpoint=endpoint,
            input_file_id=_id_of(file_id),
            completion_window=window,
            window_s=window_seconds(window),
            output_expires_after_s=None,
            metadata={},
            idempotency_key=key_of(file_id),
        )
        row = self._ask(partial(batches.insert_batch, new=new))
        if not row.is_answered_in_rows:
            problem = f"batch {PREFIX}{row.id} was made through a gateway"
            raise Invalid("--database", problem, "Pass --url, or name another --output")
        return _state(row)

    def look(self, batch: BatchState) -> BatchState:
        """The batch as it is now."""
        batch_id = parse_id(batch.id.removeprefix(PREFIX))
        return _state(
            self._ask(partial(batches.get_batch, batch_id=batch_id, tenant=DEFAULT_TENANT))
        )

    def answers(self, batch: BatchState) -> Iterator[bytes]:
        """The chunks of the batch's parts. Raises NotFound where lines lack."""
        num_lines = 0
        for name in batch.parts:
            after = 0
            while (found := self._next(name, after)) is not None:
                after, content = found
                num_lines += content.count(b"\n")
                yield content
        if num_lines < batch.num_completed + batch.num_failed:
            problem = f"{num_lines} answers of {batch.id} are in Postgres, and not all"
            raise NotFound(f"{problem}: a part was deleted, or a gateway is of an earlier release")

    def _next(self, name: str, after: int) -> tuple[int, bytes] | None:
        return self._ask(partial(files.next_answers, file_id=_id_of(name), after=after))


def _id_of(name: str) -> UUID:
    return parse_id(name.removeprefix(FILE_PREFIX))


def _state(row: BatchRow) -> BatchState:
    problems = [problem_of(each["message"], each.get("line")) for each in row.errors]
    parts = (row.output_file_id, row.error_file_id)
    return BatchState(
        id=f"{PREFIX}{row.id}",
        status=row.status.value,
        num_lines=row.num_lines,
        num_completed=row.counts.completed,
        num_failed=row.counts.failed,
        parts=tuple(f"{FILE_PREFIX}{part}" for part in parts if part is not None),
        problem=problems[0] if problems else None,
        is_taken=row.fence > 0,
    )
