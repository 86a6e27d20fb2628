"""The items that a request gives a model to read, as OpenAI's responses have them. The API's
description is made from these types.

Clients send back what an answer held, so fields that are no part of an item's meaning are passed
over: its id, its status, annotations, log-probabilities.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from services.gateway.responses.hosted_calls import AnyHostedCall

MAX_ITEMS = 4_096
"""Of one request."""

CallId = Annotated[str, Meta(min_length=1, max_length=256)]


class InputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_text"):
    """A part of what was written to the model."""

    text: str


class SaidText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """A part of a model's content."""

    text: str


class SaidRefusal(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="refusal"):
    """A refusal, in place of an answer."""

    refusal: str

    @property
    def text(self) -> str:
        """Returns it as a text like others."""
        return self.refusal


Part = InputText | SaidText | SaidRefusal


class InputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A message. `type` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | tuple[Part, ...]


class SummaryText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="summary_text"):
    """A part of the summary of what a model thought. No answer of ours has one."""

    text: str


class ReasoningText(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"
):
    """A part of what a model thought."""

    text: str


class InputReasoning(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """The reasoning before the model's next item."""

    summary: tuple[SummaryText, ...] = ()
    content: tuple[ReasoningText, ...] | None = None


class InputCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call that a model has made."""

    call_id: CallId
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    namespace: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    arguments: str


class InputCallOutput(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"
):
    """What a called function has returned."""

    call_id: CallId
    output: str | tuple[InputText, ...]


class InputCustomCall(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"
):
    """A call of a custom tool that a model has made."""

    call_id: CallId
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    input: str


class InputCustomOutput(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call_output"
):
    """What a called custom tool has returned."""

    call_id: CallId
    output: str | tuple[InputText, ...]


class InputReference(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="item_reference"
):
    """An item of an earlier response, by its id. `type` may be left out. No row has one: what is
    stored is the item."""

    id: str


InputItem = (
    InputMessage
    | InputReasoning
    | InputCall
    | InputCallOutput
    | InputCustomCall
    | InputCustomOutput
    | InputReference
)
SentItem = InputItem | AnyHostedCall
Items = Annotated[tuple[InputItem, ...], Meta(min_length=1, max_length=MAX_ITEMS)]
"""Of a response's row."""
SentItems = Annotated[tuple[SentItem, ...], Meta(min_length=1, max_length=MAX_ITEMS)]
"""Of a request."""


def text_of(content: str | tuple[Part, ...] | tuple[InputText, ...]) -> str:
    """Returns a content as one text; parts are joined by line breaks, as those of chats are."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
