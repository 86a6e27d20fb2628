"""The answers, events and errors of Anthropic's routes. The API's description is made from these
types."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from shardline.contract.job import Usage

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class TextBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """A part of the model's content."""

    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """What the model thought before. Nothing is signed: a caller may send back any thoughts."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A call of one of the request's tools."""

    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts. The whole prompt is the sum of `input_tokens` and what the prefix cache had."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0] = 0
    cache_read_input_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> MessageUsage:
        """A job's usage, as Anthropic reports it."""
        num_cached = usage.cached_tokens or 0
        return cls(
            input_tokens=usage.prompt_tokens - num_cached,
            cache_read_input_tokens=num_cached,
            output_tokens=usage.completion_tokens,
        )


class MessageAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """What `POST /v1/messages` answers. `id` holds the job's."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """What `POST /v1/messages/count_tokens` answers."""

    input_tokens: int


class MessageTextDelta(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text_delta"
):
    """More of a text."""

    text: str


class ThinkingDelta(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking_delta"
):
    """More of a thought."""

    thinking: str


class InputDelta(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_json_delta"
):
    """More of a call's input, as JSON text."""

    partial_json: str


class MessageStart(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message_start"
):
    """The message before its first token; of its usage only the prompt is known."""

    message: MessageAnswer


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="ping"):
    """The connection lives."""


class BlockStart(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_start"
):
    """A block, still empty."""

    index: int
    content_block: Block


class BlockDelta(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_delta"
):
    """More of a block."""

    index: int
    delta: MessageTextDelta | ThinkingDelta | InputDelta


class BlockStop(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_stop"
):
    """The block is whole."""

    index: int


class MessageEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Why a message ends."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message_delta"
):
    """The end of a message, with its whole usage."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStop(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message_stop"):
    """The last event."""


class ErrorDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`error_code` is the `code` of other routes, `param` the field of the request."""

    error_code: str
    param: str | None


class MessagesErrorFields(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong."""

    type: str
    message: str
    details: ErrorDetails


class MessagesError(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """The body of every error, and an event of a stream that breaks off."""

    error: MessagesErrorFields
    request_id: str | None


MessageEvent = (
    MessageStart
    | Ping
    | BlockStart
    | BlockDelta
    | BlockStop
    | MessageDelta
    | MessageStop
    | MessagesError
)
