"""The event: what a webhook reports of an ended job, response or batch, under which names,
and the secret that signs it. Knows no database and no server.

Names and forms are OpenAI's, and Standard Webhooks'; `job.*` are ours.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from uuid import UUID

import msgspec

from shardline.base.errors import Invalid
from shardline.contract.request_parsing import shown

ENDPOINT = "we_"
DELIVERY = "wh_"
"""Before the ids of endpoints and deliveries, as clients see them."""

SECRET = "whsec_"  # noqa: S105 (the form of one)
SECRET_BYTES = 32
HINT_CHARS = 4
ALL = "*"


class EventType(StrEnum):
    """Everything that an endpoint may hear of."""

    RESPONSE_COMPLETED = "response.completed"
    RESPONSE_FAILED = "response.failed"
    RESPONSE_CANCELLED = "response.cancelled"
    RESPONSE_INCOMPLETE = "response.incomplete"
    """These four are of responses in the background: others have a caller who waits."""
    BATCH_COMPLETED = "batch.completed"
    BATCH_FAILED = "batch.failed"
    BATCH_EXPIRED = "batch.expired"
    BATCH_CANCELLED = "batch.cancelled"
    JOB_SUCCEEDED = "job.succeeded"
    JOB_FAILED = "job.failed"
    JOB_CANCELLED = "job.cancelled"
    JOB_EXPIRED = "job.expired"
    """Of any other job, but those of a batch."""


OBJECTS = {"response": "resp_", "batch": "batch_", "job": ""}
"""What has ended, by the first part of an event's name, and how its id begins."""


class EventObject(msgspec.Struct, frozen=True, kw_only=True):
    """What has ended. The rest is asked for by its id, with an API key."""

    id: str


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a webhook."""

    id: str
    object: str = "event"
    created_at: int
    type: str
    data: EventObject


def encode_event(event_type: str, object_id: UUID, ended_at: datetime) -> bytes:
    """Returns the body, the same ones for each attempt: a signature covers its bytes."""
    event = Event(
        id=f"evt_{object_id}",
        created_at=int(ended_at.timestamp()),
        type=event_type,
        data=EventObject(id=object_name(event_type, object_id)),
    )
    return msgspec.json.encode(event)


def object_name(event_type: str, object_id: UUID) -> str:
    """Returns the id of what has ended, as its own route knows it."""
    return f"{OBJECTS[event_type.partition('.')[0]]}{object_id}"


def event_types(names: Sequence[str]) -> tuple[EventType, ...]:
    """Names of events, or `job.*` for all of a kind, or `*` → the events in their order. Raises
    Invalid."""
    found: set[EventType] = set()
    for name in names:
        named = [each for each in EventType if each == name or _is_of(each, name)]
        if not named:
            known = ", ".join(EventType)
            problem = f"{shown(repr(name))} is none"
            raise Invalid("event_types", problem, f"Use some of: {known}; or job.*, or *")
        found.update(named)
    if not found:
        raise Invalid("event_types", "there are none", f"Use some of: {', '.join(EventType)}")
    return tuple(each for each in EventType if each in found)


def new_secret() -> str:
    """Returns a secret that signs one endpoint's webhooks, in Standard Webhooks' form."""
    return SECRET + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def secret_hint(secret: str) -> str:
    """Returns what may be shown of a secret later, for a person to tell two of them apart."""
    return f"{SECRET}…{secret[-HINT_CHARS:]}"


def _is_of(event: EventType, pattern: str) -> bool:
    return pattern in (ALL, f"{event.partition('.')[0]}.{ALL}")
