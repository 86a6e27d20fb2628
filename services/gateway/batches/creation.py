"""Makes a batch from a body. A keeper then reads its file."""

from __future__ import annotations

from functools import partial

import msgspec
from fastapi import Request

from services.gateway.batches.bodies import BatchRequest
from services.gateway.context import Gateway
from services.gateway.files.bodies import file_id_of
from services.gateway.guard import Caller
from services.gateway.http.json_body import Document, read_object
from services.gateway.request_body import check_is_json
from shardline.base.errors import Invalid
from shardline.contract.batches.batch import PURPOSE
from shardline.contract.request_parsing import check_metadata, invalid_from
from shardline.store import batches, files
from shardline.store.batches import BatchRow, NewBatch
from shardline.store.connection.encoding import unstorable

MAX_KEY_CHARS = 256


async def create(gateway: Gateway, request: Request, caller: Caller) -> BatchRow:
    """Store a batch. Raises Invalid, Conflict."""
    check_is_json(request)
    with gateway.admission.reading() as room:
        asked = _parse(read_object(await gateway.admission.read(request, room)))
    window_s = asked.window_s
    file_id = file_id_of(asked.input_file_id, "input_file_id")
    find = partial(files.find_file, file_id=file_id, tenant=caller.tenant)
    file = await gateway.client.ask(find)
    if file is None or file.purpose != PURPOSE:
        problem = f"no file for batches has the id {asked.input_file_id[:64]!r}"
        raise Invalid("input_file_id", problem, "Upload it with purpose batch")
    expires = asked.output_expires_after
    new = NewBatch(
        tenant=caller.tenant,
        key_name=caller.key_name,
        endpoint=asked.endpoint,
        input_file_id=file_id,
        completion_window=asked.completion_window,
        window_s=window_s,
        output_expires_after_s=None if expires is None else expires.seconds,
        metadata=asked.metadata or {},
        idempotency_key=_key(request),
    )
    row = await gateway.client.ask(partial(batches.insert_batch, new=new))
    gateway.batches_due.set()
    return row


def _key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not 1 <= len(key) <= MAX_KEY_CHARS:
        problem = f"it has {len(key)} characters; {MAX_KEY_CHARS} is the limit"
        raise Invalid("idempotency_key", problem, "Send another one")
    return key


def _parse(document: Document) -> BatchRequest:
    try:
        asked = msgspec.convert(document, BatchRequest)
    except msgspec.ValidationError as error:
        raise invalid_from(error) from error
    check_metadata(asked.metadata or {})
    if (problem := unstorable(asked.metadata or {})) is not None:
        raise Invalid("metadata", problem, "Change it: Postgres cannot store it")
    return asked
