"""Answers of a batch as rows, for a maker who reads Postgres alone. A gateway that is killed goes
on behind the last row."""

from __future__ import annotations

import time
from functools import partial
from uuid import UUID

from sqlalchemy import Connection

from services.gateway.batches.ingestion import SLICE_S
from services.gateway.batches.line_answers import AnsweredPage, answered_page
from services.gateway.context import Gateway
from shardline.store import batches, files
from shardline.store.batches import BatchRow


async def write_answers(gateway: Gateway, batch: BatchRow) -> bool:
    """Writes lines of a batch all of which have ended, for a slice of time. Returns whether all are
    written. Raises TurnLost, Unavailable."""
    until_s = time.monotonic() + SLICE_S
    row = await gateway.client.ask(partial(batches.read_batch, batch_id=batch.id))
    if row is None:
        return True
    parts = ((row.output_file_id, True), (row.error_file_id, False))
    for file_id, has_succeeded in parts:
        if file_id is None:
            continue
        after = await gateway.client.ask(partial(files.last_answered, file_id=file_id))
        while True:
            await gateway.client.ask(partial(batches.renew, batch=batch))
            page = await answered_page(gateway, batch, after=after, has_succeeded=has_succeeded)
            if page is None:
                break
            add = partial(_add, batch=batch, file_id=file_id, page=page)
            if not await gateway.client.ask(add):
                break
            after = page.last_line
            if time.monotonic() >= until_s:
                return False
    return True


def _add(connection: Connection, batch: BatchRow, file_id: UUID, page: AnsweredPage) -> bool:
    """Writes a page within its turn, so that none is written twice."""
    batches.renew(connection, batch)
    last_line, content = page.last_line, page.content
    return files.add_answers(connection, file_id, last_line=last_line, content=content)
