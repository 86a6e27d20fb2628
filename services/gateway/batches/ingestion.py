"""From a batch's file to rows: all of it is looked at first, then lines become jobs, some in a
transaction together with their place in the file. A gateway that is killed goes on from there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import structlog

from services.gateway.batches.envelope import Envelope, read_envelope
from services.gateway.batches.input_lines import InputLine, LineSplitter, input_lines
from services.gateway.batches.line_answers import CANCELLED, EXPIRED, over, refusal
from services.gateway.batches.line_requests import EncodedLine, LinePlace, encoded_lines
from services.gateway.batches.validation import FileCheck
from services.gateway.context import Gateway
from shardline.base.errors import Invalid, LimitExceeded, ShardlineError
from shardline.contract.batches.batch import CHUNK_BYTES, BatchStatus
from shardline.store import batches, files
from shardline.store.batch_lines import NewLine, RefusedLines, add_lines
from shardline.store.batches import BatchRow

log = structlog.get_logger(__name__)

MAX_GROUP_LINES = 128
MAX_GROUP_BYTES = 1 << 20
"""Of lines in one transaction; a larger one travels alone."""

SLICE_S = 2.0
"""Of one batch's lines, before another batch has its turn."""


class LinesWait(Exception):
    """A quota has no room for the next line now; those before it are rows."""

    def __init__(self, batch: BatchRow, retry_after_s: float) -> None:
        super().__init__(f"room is looked for again in {retry_after_s:.1f} s")
        self.batch = batch
        self.retry_after_s = retry_after_s


class LineReading:
    """Knows where a turn is in a batch's file."""

    def __init__(self, gateway: Gateway, batch: BatchRow) -> None:
        self.gateway = gateway
        self.batch = batch
        self.models: dict[int, str] = {}
        """Of the lines that are being stored, by their numbers."""
        self._until_s = time.monotonic() + SLICE_S
        self._expires_s = time.monotonic() + batch.expires_in_s

    @property
    def is_over(self) -> bool:
        """Whether the slice is."""
        return time.monotonic() >= self._until_s

    @property
    def left_s(self) -> float:
        """Until the batch expires."""
        return self._expires_s - time.monotonic()


async def check_file(gateway: Gateway, batch: BatchRow) -> None:
    """Looks at a whole file, and either fails its batch or begins it. Raises TurnLost."""
    max_bytes = gateway.settings.http_max_body_bytes
    check = FileCheck(batch.endpoint, max_line_bytes=max_bytes)
    splitter = LineSplitter(max_bytes=max_bytes)
    async for lines in input_lines(_chunks(gateway, batch, 0), splitter):
        await asyncio.to_thread(check.push, lines)
        await gateway.client.ask(partial(batches.renew, batch=batch))
    check.end()
    if check.errors:
        errors = [msgspec.to_builtins(error) for error in check.errors]
        await gateway.client.ask(partial(batches.fail, batch=batch, errors=errors))
        return
    begin = partial(
        batches.begin_lines,
        batch=batch,
        num_lines=check.num_lines,
        last_line=check.last_line,
        model=check.model,
    )
    await gateway.client.ask(begin)


async def read_lines(gateway: Gateway, batch: BatchRow) -> BatchRow:
    """Makes the next lines rows, for a slice of time; returns the batch as it is then. Raises
    TurnLost, LinesWait, Unavailable, Overload."""
    reading = LineReading(gateway, batch)
    splitter = LineSplitter(
        max_bytes=gateway.settings.http_max_body_bytes,
        first_byte=batch.next_byte,
        first_number=batch.next_line,
    )
    group: list[InputLine] = []
    num_bytes = 0
    async for lines in input_lines(_chunks(gateway, batch, batch.next_byte), splitter):
        for line in lines:
            size = len(line.data or b"")
            if group and (len(group) == MAX_GROUP_LINES or num_bytes + size > MAX_GROUP_BYTES):
                await _store(reading, group)
                group = []
                num_bytes = 0
                if reading.is_over:
                    return reading.batch
            group.append(line)
            num_bytes += size
    if group:
        await _store(reading, group)
    if not reading.batch.is_read:
        log.warning("the file of a batch is gone", batch_id=str(batch.id))
        await gateway.client.ask(partial(batches.give_up_lines, batch=reading.batch))
        return replace(reading.batch, last_line=reading.batch.next_line - 1)
    return reading.batch


async def _chunks(gateway: Gateway, batch: BatchRow, first_byte: int) -> AsyncIterator[bytes]:
    """The input's bytes from one on."""
    number, skipped = divmod(first_byte, CHUNK_BYTES)
    file_id = batch.input_file_id
    while True:
        chunk = partial(files.read_chunk, file_id=file_id, number=number)
        content = await gateway.client.ask(chunk)
        if content is None:
            return
        yield content[skipped:]
        skipped = 0
        number += 1


async def _store(reading: LineReading, group: Sequence[InputLine]) -> None:
    """Inserts lines with their jobs. What is wrong with one of them is its own."""
    lines = await _new_lines(reading, group)
    wait_s: float | None = None
    while lines:
        try:
            await _add(reading, lines, group[len(lines) - 1].end)
        except RefusedLines as refused:
            waiting = [one for one in lines if _retry_s(refused.errors.get(one.line)) is not None]
            if waiting:
                wait_s = _retry_s(refused.errors[waiting[0].line])
                lines = lines[: lines.index(waiting[0])]
            lines = [_with_error(one, refused.errors.get(one.line)) for one in lines]
        except Invalid as error:
            # A row against a rule of the table: halved, so that the others are stored.
            if len(group) > 1:
                half = len(group) // 2
                await _store(reading, group[:half])
                await _store(reading, group[half:])
                return
            lines = [_with_error(lines[0], error)]
        else:
            break
    if wait_s is not None:
        raise LinesWait(reading.batch, wait_s)


def _retry_s(error: ShardlineError | None) -> float | None:
    """When a line may find room that has found none."""
    return error.retry_after_s if isinstance(error, LimitExceeded) else None


async def _add(reading: LineReading, lines: Sequence[NewLine], next_byte: int) -> None:
    batch = reading.batch
    add = partial(add_lines, batch=batch, lines=lines, next_byte=next_byte)
    await reading.gateway.client.ask(add)
    reading.batch = replace(batch, next_line=lines[-1].line + 1, next_byte=next_byte)
    accepted = reading.gateway.metrics.accepted
    for one in lines:
        if one.request is not None:
            accepted.labels(reading.models[one.line]).inc(1 + len(one.request.others))


async def _new_lines(reading: LineReading, group: Sequence[InputLine]) -> list[NewLine]:
    batch = reading.batch
    max_bytes = reading.gateway.settings.http_max_body_bytes
    envelopes = [read_envelope(line, max_bytes=max_bytes) for line in group]
    numbered = list(zip((line.number for line in group), envelopes, strict=True))
    is_cancelled = batch.status is BatchStatus.CANCELLING
    if is_cancelled or reading.left_s <= 0:
        why = over(CANCELLED if is_cancelled else EXPIRED)
        return [NewLine(line=line, custom_id=one.custom_id, error=why) for line, one in numbered]
    place = LinePlace(
        batch_id=batch.id, endpoint=batch.endpoint, tenant=batch.tenant, left_s=reading.left_s
    )
    asked = [(number, one.body) for number, one in numbered if one.error is None]
    outcomes = await encoded_lines(reading.gateway, place, asked)
    found = dict(zip((number for number, _ in asked), outcomes, strict=True))
    reading.models = {
        number: one.model for number, one in found.items() if isinstance(one, EncodedLine)
    }
    return [_new_line(number, one, found.get(number)) for number, one in numbered]


def _new_line(
    number: int, envelope: Envelope, outcome: EncodedLine | ShardlineError | None
) -> NewLine:
    error = envelope.error or (outcome if isinstance(outcome, ShardlineError) else None)
    if error is not None:
        return NewLine(line=number, custom_id=envelope.custom_id, error=refusal(error))
    assert isinstance(outcome, EncodedLine), "a line without an error has a request"
    return NewLine(
        line=number,
        custom_id=envelope.custom_id,
        request=outcome.request,
        num_choices=outcome.num_choices,
        options=outcome.options,
    )


def _with_error(line: NewLine, error: ShardlineError | None) -> NewLine:
    if error is None:
        return line
    return NewLine(line=line.line, custom_id=line.custom_id, error=refusal(error))
