"""The bodies of OpenAI's routes for stored completions. The API's description is made from these
types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.openai.bodies import ChatCompletion

MAX_LISTED = 100

Limit = Annotated[int, Meta(ge=1, le=MAX_LISTED)]
Order = Literal["asc", "desc"]


class CompletionQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of `GET /v1/chat/completions`, without `metadata[key]=value`."""

    model: str | None = None
    limit: Limit = 20
    order: Order = "asc"
    after: str | None = None


class MessageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of `GET /v1/chat/completions/{completion_id}/messages`."""

    limit: Limit = 20
    order: Order = "asc"
    after: str | None = None


class MetadataChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/chat/completions/{completion_id}`."""

    metadata: dict[str, Any] | None


class StoredChatCompletion(ChatCompletion, frozen=True, kw_only=True, tag="chat.completion"):
    """A completion as it was answered, with its metadata."""

    metadata: dict[str, Any]


class CompletionList(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """One page; `last_id` is `after` of the next one."""

    data: list[StoredChatCompletion]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StoredMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message that was asked with, as it is stored; its other fields are those of the request."""

    id: str
    role: str
    content: str | None
    name: str | None = None
    content_parts: None = None


class MessageList(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """One page; `last_id` is `after` of the next one."""

    data: list[StoredMessage]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedCompletion(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="chat.completion.deleted"
):
    """A completion that is stored no more."""

    id: str
    deleted: Literal[True]
