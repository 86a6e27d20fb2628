"""References to items of earlier responses: each becomes its item before the request is stored, so
that the earlier response may be deleted."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from uuid import UUID

import msgspec
from msgspec.structs import replace

from services.gateway.context import Gateway
from services.gateway.responses.conversation import listed, messages_of
from services.gateway.responses.input_items import InputItem, InputReference, Items, SentItem
from services.gateway.responses.output_items import ListedItem, OutputItem
from services.gateway.responses.requests import ResponseRequest, items_of, kept_items_of
from services.gateway.responses.response_events import answers_of, whole
from shardline.base.errors import Invalid
from shardline.store.responses import ReferencedJobs, ResponseRow

MAX_RESPONSES = 256
"""Responses that the references of one request lead to."""

ITEM_ID = re.compile(r"(?:msg|rs|fc|fco|ctc|ctco)_([0-9a-f-]{36})_(in)?[0-9]+")
"""As `ResponseOutput` and `listed` make them: of the output, or with `in` of the input."""

Found = dict[str, OutputItem | ListedItem]
"""Items by their ids."""


async def with_referenced(gateway: Gateway, request: ResponseRequest) -> ResponseRequest:
    """The request with the items that its references name, in their places. Raises Invalid, and
    UnknownModel where the model of an earlier response is not registered any more."""
    items = items_of(request.asked)
    places = _places(items)
    if not places:
        return request
    wanted = _wanted(places)
    rows = await gateway.client.referenced(wanted, tenant=request.tenant)
    _check_ended(places, rows)
    found: Found = {}
    for job_id in sorted(wanted.outputs):
        document = await whole(await answers_of(gateway, rows[job_id]))
        found |= {item.id: item for item in document.output}
    inputs = [rows[job_id] for job_id in sorted(wanted.inputs)]
    return await asyncio.to_thread(_resolved, request, found, inputs)


def _places(items: Iterable[SentItem]) -> dict[str, int]:
    """Maps the id of each referenced item to its place. Raises Invalid for an id that comes twice:
    a short request could grow without limit."""
    places: dict[str, int] = {}
    for place, item in enumerate(items):
        if not isinstance(item, InputReference):
            continue
        if item.id in places:
            problem = f"duplicate item: input[{places[item.id]}] has the id {item.id[:64]!r} too"
            raise Invalid(_field(place), problem, "Send each item once")
        places[item.id] = place
    return places


def _wanted(places: Mapping[str, int]) -> ReferencedJobs:
    outputs: set[UUID] = set()
    inputs: set[UUID] = set()
    for item_id, place in places.items():
        job_id, is_input = _parsed(item_id, place)
        (inputs if is_input else outputs).add(job_id)
    if (number := len(outputs | inputs)) > MAX_RESPONSES:
        problem = f"its references lead to {number} responses, over the limit of {MAX_RESPONSES}"
        raise Invalid("input", problem, "Send the items of some of them")
    return ReferencedJobs(outputs=frozenset(outputs), inputs=frozenset(inputs))


def _parsed(item_id: str, place: int) -> tuple[UUID, bool]:
    """The job of an item, and whether the item is of its input."""
    match = ITEM_ID.fullmatch(item_id)
    try:
        if match is not None:
            return UUID(match[1]), match[2] is not None
    except ValueError:
        pass
    raise _not_found(item_id, place)


def _check_ended(places: Mapping[str, int], rows: Mapping[UUID, ResponseRow]) -> None:
    """Raises Invalid for the first reference to a response that is not there, or to an output that
    is not."""
    for item_id, place in places.items():
        job_id, is_input = _parsed(item_id, place)
        row = rows.get(job_id)
        if row is None:
            raise _not_found(item_id, place)
        if is_input:
            continue
        if not row.job.state.terminal:
            problem = f"its response is {row.job.state}"
            raise Invalid(_field(place), problem, "Wait for its end, or cancel it")
        if row.job.result is None:
            problem = f"its response is {row.job.state} and has no output"
            raise Invalid(_field(place), problem, "Leave it out")


def _resolved(
    request: ResponseRequest, found: Found, inputs: Sequence[ResponseRow]
) -> ResponseRequest:
    for row in inputs:
        found |= {item.id: item for item in listed(row.job.id, msgspec.convert(row.input, Items))}
    items = tuple(
        _item(found, item, place) if isinstance(item, InputReference) else item
        for place, item in enumerate(items_of(request.asked))
    )
    asked = replace(request.asked, input=items)
    messages = messages_of(kept_items_of(asked), instructions=asked.instructions)
    return replace(request, asked=asked, messages=messages)


def _item(found: Found, reference: InputReference, place: int) -> InputItem:
    item = found.get(reference.id)
    if item is None:
        raise _not_found(reference.id, place)
    return as_sent(item, place)


def as_sent(item: OutputItem | ListedItem, place: int) -> InputItem:
    """The item as a caller would send it back. Raises Invalid for one that no request may hold:
    some models make up the ids of their calls."""
    try:
        sent: InputItem = msgspec.convert(msgspec.to_builtins(item), InputItem)
    except msgspec.ValidationError as error:
        raise Invalid(_field(place), f"no request may hold it: {error}", "Leave it out") from error
    return sent


def _not_found(item_id: str, place: int) -> Invalid:
    problem = f"item with id {item_id[:64]!r} not found"
    return Invalid(_field(place), problem, "Send the id of one that is stored, or the item itself")


def _field(place: int) -> str:
    return f"input[{place}].id"
