"""The OpenAPI description of Anthropic's routes: bodies with their fields and our own, errors in
their form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from services.gateway.anthropic import answers
from services.gateway.anthropic.bodies import NEUTRAL
from services.gateway.anthropic.error_form import REQUEST_ID, status_of
from services.gateway.anthropic.requests import MessageRequest
from services.gateway.schemas import (
    SCHEMAS,
    Content,
    answer,
    body,
    errors,
    events,
    json_body,
    neutral_schema,
)

IDS = ("x-request-id", REQUEST_ID)

EVENT_TYPES: tuple[type[msgspec.Struct], ...] = (
    answers.MessageStart,
    answers.Ping,
    answers.BlockStart,
    answers.BlockDelta,
    answers.BlockStop,
    answers.MessageDelta,
    answers.MessageStop,
    answers.MessagesError,
)


def message_body(kind: type[msgspec.Struct], own: Iterable[str]) -> dict[str, Any]:
    """The `openapi_extra` of a route with a body of Anthropic's; `own` are fields of ours."""
    job, described = body(MessageRequest), json_body(kind)
    properties = described[SCHEMAS][kind.__name__]["properties"]
    ours = job[SCHEMAS][MessageRequest.__name__]["properties"]
    properties |= {name: ours[name] for name in sorted(own)}
    properties |= {name: neutral_schema(values) for name, values in NEUTRAL.items()}
    return {**job, **described, SCHEMAS: {**job[SCHEMAS], **described[SCHEMAS]}}


def message_events() -> Content:
    """The events of a streamed message: each has its type as name."""
    return events({str(kind.__struct_config__.tag): kind for kind in EVENT_TYPES})


def message_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route for the requests that it refuses; `statuses` are those of other
    routes."""
    found: dict[int | str, dict[str, Any]] = {}
    for status, described in errors(*statuses).items():
        what = described["description"].replace("`code`", "`error.details.error_code`")
        headers = (*described["headers"], *IDS)
        found[status_of(int(status))] = answer(what, answers.MessagesError, headers=headers)
    return found
