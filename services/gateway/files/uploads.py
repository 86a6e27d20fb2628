"""Uploads: a form's file goes into Postgres a chunk at a time, while it comes. What breaks off
leaves nothing that counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from functools import partial
from uuid import UUID

import msgspec
from fastapi import Request

from services.gateway.context import Gateway
from services.gateway.errors import NotJson, TooLarge, TooSlow
from services.gateway.files.bodies import FileFields, stored_filename
from services.gateway.files.upload_form import FORM, UploadForm, boundary_of
from services.gateway.guard import Caller
from shardline.base.errors import Invalid, ShardlineError
from shardline.contract.batches.batch import CHUNK_BYTES
from shardline.contract.request_parsing import invalid_from
from shardline.store import files
from shardline.store.connection.encoding import unstorable
from shardline.store.files import FileRow

BUFFERED_BYTES = 3 * CHUNK_BYTES
"""Of an upload at most: a chunk that is collected, one on its way, and what came meanwhile."""


async def upload(gateway: Gateway, request: Request, caller: Caller) -> FileRow:
    """Store the file of a form. Raises Invalid, Overload, Unavailable: then there is none."""
    boundary = boundary_of(request.headers.get("content-type", ""))
    if boundary is None:
        kind = request.headers.get("content-type", "")[:64]
        raise NotJson("content-type", f"{kind!r} is not {FORM} with a boundary", f"Send {FORM}")
    form = UploadForm(boundary)
    with gateway.admission.reading() as room:
        room.add(BUFFERED_BYTES)
        file_id = await gateway.client.ask(partial(files.begin_upload, tenant=caller.tenant))
        try:
            await _store_chunks(gateway, request, caller.tenant, form, file_id)
            return await _end(gateway, form, file_id)
        except BaseException:
            # Without a server it goes with the next look at what has not ended.
            with suppress(ShardlineError):
                await gateway.client.ask(partial(files.drop_upload, file_id=file_id))
            raise


async def _store_chunks(
    gateway: Gateway, request: Request, tenant: str, form: UploadForm, file_id: UUID
) -> None:
    settings = gateway.settings
    num_bytes = 0
    number = 0
    async with aclosing(_pieces(request, settings.http_body_timeout_s)) as pieces:
        async for piece in pieces:
            num_bytes += len(piece)
            if num_bytes > settings.http_max_file_bytes + CHUNK_BYTES:
                raise _too_large(settings.http_max_file_bytes)
            form.push(piece)
            while len(form.content) >= CHUNK_BYTES:
                await _add(gateway, tenant, form, file_id, number)
                number += 1
    if form.content:
        await _add(gateway, tenant, form, file_id, number)
    if not form.is_whole:
        raise Invalid("body", "the form has no end", "Send it whole")


async def _pieces(request: Request, timeout_s: float) -> AsyncGenerator[bytes, None]:
    """The body as it comes. Raises TooSlow for one of which a chunk's bytes take too long."""
    stream: AsyncIterator[bytes] = request.stream()
    num_bytes = 0
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            async with asyncio.timeout_at(deadline_s):
                piece = await anext(stream, None)
        except TimeoutError as error:
            problem = f"{CHUNK_BYTES} bytes of it did not arrive within {timeout_s:g} s"
            raise TooSlow("body", problem, "Send it again") from error
        if piece is None:
            return
        yield piece
        num_bytes += len(piece)
        if num_bytes >= CHUNK_BYTES:
            num_bytes = 0
            deadline_s = asyncio.get_running_loop().time() + timeout_s


async def _add(gateway: Gateway, tenant: str, form: UploadForm, file_id: UUID, number: int) -> None:
    limit = gateway.settings.http_max_file_bytes
    content = form.take(CHUNK_BYTES)
    if number * CHUNK_BYTES + len(content) > limit:
        raise _too_large(limit)
    chunk = partial(
        files.add_chunk,
        file_id=file_id,
        number=number,
        content=content,
        tenant=tenant,
        max_stored_bytes=gateway.settings.http_max_stored_bytes,
    )
    await gateway.client.ask(chunk)


async def _end(gateway: Gateway, form: UploadForm, file_id: UUID) -> FileRow:
    if form.filename is None:
        raise Invalid("file", "the form has none", "Send the file in a part named file")
    name = stored_filename(form.filename)
    if unstorable(name) is not None:
        raise Invalid("file", "its name holds what Postgres cannot store", "Rename it")
    fields = _fields(form.fields)
    end = partial(
        files.end_upload,
        file_id=file_id,
        filename=name,
        purpose=fields.purpose,
        expires_after_s=fields.seconds,
    )
    return await gateway.client.ask(end)


def _fields(sent: dict[str, str]) -> FileFields:
    """Returns the fields of a form from their texts. Raises Invalid."""
    known = FileFields.__struct_encode_fields__
    for name in sent:
        if name not in known:
            raise Invalid(name[:64], "no form has this field", f"Use {', '.join(known)}")
    try:
        fields = msgspec.convert(sent, FileFields, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_from(error) from error
    if (fields.anchor is None) != (fields.seconds is None):
        problem = "anchor and seconds belong together"
        raise Invalid("expires_after", problem, "Send both, or leave them out")
    return fields


def _too_large(limit: int) -> TooLarge:
    return TooLarge("file", f"it is over {limit} bytes", "Send several files")
