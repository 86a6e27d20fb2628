"""The body of a request: JSON, bounded and counted while it is worked on, on a thread if it is
large. Knows no field."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import msgspec
from fastapi import Request

from services.gateway.admission import Room
from services.gateway.context import Gateway
from services.gateway.errors import NotJson
from services.gateway.http.json_body import check_fields, decoded_bytes, read_object
from shardline.base.clock import monotonic_s
from shardline.contract.request_parsing import invalid_from

JSON = "application/json"
LARGE_BYTES = 8 << 10
"""Bodies of at least this size are parsed and tokenized on a thread, off the event loop: at 0.35 s
for each MB smaller ones hold others up for 3 ms at most, about what a turn of the loop costs with
many streams."""

ArgumentsT = ParamSpec("ArgumentsT")
ValueT = TypeVar("ValueT")
BodyT = TypeVar("BodyT", bound=msgspec.Struct)


@dataclass(slots=True)
class RequestBody:
    """A whole body, checked for its size alone, and the memory that it is counted in."""

    data: bytes
    room: Room
    is_large: bool = False
    """Whether work on it may hold others up."""
    began_s: float = field(default_factory=monotonic_s)
    key_name: str | None = None
    """Of its caller's API key."""

    def __post_init__(self) -> None:
        self.is_large |= len(self.data) >= LARGE_BYTES

    async def run(
        self,
        work: Callable[ArgumentsT, ValueT],
        *arguments: ArgumentsT.args,
        **options: ArgumentsT.kwargs,
    ) -> ValueT:
        """Run what takes as long as the body is large: short work at once, long work on a thread,
        so that other requests proceed."""
        if not self.is_large:
            return work(*arguments, **options)
        return await asyncio.to_thread(work, *arguments, **options)


async def read_body(gateway: Gateway, request: Request, kind: type[BodyT]) -> BodyT:
    """The body of a request as a struct. Raises Invalid, NotJson."""
    check_is_json(request)
    with gateway.admission.reading() as room:
        body = RequestBody(await gateway.admission.read(request, room), room)
        return await body.run(_converted, body.data, kind)


def _converted(data: bytes, kind: type[BodyT]) -> BodyT:
    try:
        return msgspec.convert(read_object(data), kind)
    except msgspec.ValidationError as error:
        raise invalid_from(error) from error


@asynccontextmanager
async def request_body(gateway: Gateway, request: Request) -> AsyncIterator[RequestBody]:
    """Read the body and count its bytes until the end of the block. Raises Invalid, Overload."""
    check_is_json(request)
    with gateway.admission.reading() as room:
        body = RequestBody(await gateway.admission.read(request, room), room)
        await body.run(check_fields, body.data)
        room.add_decoded(await body.run(decoded_bytes, body.data))
        yield body


def check_is_json(request: Request) -> None:
    """Refuse a body that any web page could make its reader's browser send."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != JSON:
        raise NotJson("content-type", f"{kind[:64]!r} is not {JSON}", f"Send Content-Type: {JSON}")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise NotJson(
            "content-encoding", f"{encoding[:64]!r} is not supported", "Send the body unpacked"
        )
