"""The items of a response's output. The API's description is made from these types."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.openai.bodies import ContentLogprob
from services.gateway.responses.input_items import ReasoningText, SummaryText

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message. `logprobs` are there if they were asked for."""

    text: str
    annotations: tuple[()] = ()
    logprobs: list[ContentLogprob] = []


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought. It is all there: nothing is encrypted, and nothing summed up."""

    id: str
    status: ItemStatus
    summary: tuple[SummaryText, ...] = ()
    content: list[ReasoningText]
    encrypted_content: None = None


class CallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function; its output is sent back with its `call_id`."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str


class CustomCallItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"
):
    """A call of a custom tool; its output is sent back with its `call_id`."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str


OutputItem = MessageItem | ReasoningItem | CallItem | CustomCallItem


class ListedMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A message of the input."""

    id: str
    status: ItemStatus
    role: Literal["user", "assistant", "system", "developer"]
    content: list[ListedPart]


class ListedText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_text"):
    """A part of what was written to the model."""

    text: str


class ListedCallOutput(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"
):
    """What a called function has returned."""

    id: str
    status: ItemStatus
    call_id: str
    output: str


class ListedCustomOutput(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call_output"
):
    """What a called custom tool has returned."""

    id: str
    status: ItemStatus
    call_id: str
    output: str


ListedPart = ListedText | OutputText
ListedItem = (
    ListedMessage
    | ReasoningItem
    | CallItem
    | CustomCallItem
    | ListedCallOutput
    | ListedCustomOutput
)


class ItemList(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """A page of a response's input."""

    data: list[ListedItem]
    first_id: str | None
    last_id: str | None
    has_more: bool
