"""Contents of files on their way out, a chunk at a time. Knows no route."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from functools import partial
from urllib.parse import quote

from fastapi import Response
from fastapi.responses import StreamingResponse

from services.gateway.context import Gateway
from shardline.base.errors import NotFound
from shardline.store import files
from shardline.store.files import FileRow

MEDIA = "application/octet-stream"


async def chunks(gateway: Gateway, file: FileRow) -> AsyncIterator[bytes]:
    """The content of a file that was uploaded. Raises NotFound where it is deleted meanwhile."""
    number = num_bytes = 0
    while num_bytes < file.num_bytes:
        chunk = partial(files.read_chunk, file_id=file.id, number=number)
        content = await gateway.client.ask(chunk)
        if content is None:
            raise NotFound(f"the file file-{file.id} was deleted while it was read")
        yield content
        number += 1
        num_bytes += len(content)


async def content_response(pieces: AsyncIterator[bytes], *, filename: str) -> Response:
    """Sends pieces as they come, in chunks of HTTP: a failure in the middle breaks the connection,
    so that no reader takes a part for the whole. Raises what the first piece raises."""
    first = await anext(pieces, b"")

    async def all_pieces() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    headers = {"content-disposition": _disposition(filename)}
    return StreamingResponse(all_pieces(), media_type=MEDIA, headers=headers)


def _disposition(filename: str) -> str:
    """The name under which browsers and `curl -OJ` save a file (RFC 6266)."""
    plain = re.sub(r"[^ \w.()-]", "_", filename, flags=re.ASCII)
    disposition = f'attachment; filename="{plain}"'
    if plain == filename:
        return disposition
    return f"{disposition}; filename*=utf-8''{quote(filename)}"
