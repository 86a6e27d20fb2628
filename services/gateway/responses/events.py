"""The events of a streamed response, numbered from 0. The API's description is made from these
types."""

from __future__ import annotations

import msgspec

from services.gateway.openai.bodies import ContentLogprob
from services.gateway.responses.documents import ResponseDocument
from services.gateway.responses.input_items import ReasoningText
from services.gateway.responses.output_items import OutputItem, OutputText


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What all events have."""

    sequence_number: int


class StateEvent(ResponseEvent, frozen=True, kw_only=True):
    """The response as it is in a state."""

    response: ResponseDocument


class ResponseCreated(StateEvent, frozen=True, kw_only=True, tag="response.created"):
    """Its row is committed."""


class ResponseQueued(StateEvent, frozen=True, kw_only=True, tag="response.queued"):
    """It waits; sent for those in the background."""


class ResponseInProgress(StateEvent, frozen=True, kw_only=True, tag="response.in_progress"):
    """The model reads its prompt, or generates."""


class ResponseCompleted(StateEvent, frozen=True, kw_only=True, tag="response.completed"):
    """It has ended as the model wanted."""


class ResponseIncomplete(StateEvent, frozen=True, kw_only=True, tag="response.incomplete"):
    """It has ended before that: by its limit of tokens, or cancelled (see its status)."""


class ResponseFailed(StateEvent, frozen=True, kw_only=True, tag="response.failed"):
    """It has ended without a result, or by its deadline."""


class ItemEvent(ResponseEvent, frozen=True, kw_only=True):
    """An item begins or is done."""

    output_index: int
    item: OutputItem


class ItemAdded(ItemEvent, frozen=True, kw_only=True, tag="response.output_item.added"):
    """A new item, empty."""


class ItemDone(ItemEvent, frozen=True, kw_only=True, tag="response.output_item.done"):
    """A whole item."""


class DetailEvent(ResponseEvent, frozen=True, kw_only=True):
    """Something inside of an item."""

    item_id: str
    output_index: int


class ContentEvent(DetailEvent, frozen=True, kw_only=True):
    """Something inside of an item's content, which has one part."""

    content_index: int = 0


class PartAdded(ContentEvent, frozen=True, kw_only=True, tag="response.content_part.added"):
    """A new part, empty."""

    part: OutputText | ReasoningText


class PartDone(ContentEvent, frozen=True, kw_only=True, tag="response.content_part.done"):
    """A whole part."""

    part: OutputText | ReasoningText


class TextDelta(ContentEvent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """Text that one token has settled, with the log-probabilities since the event before."""

    delta: str
    logprobs: list[ContentLogprob]


class TextDone(ContentEvent, frozen=True, kw_only=True, tag="response.output_text.done"):
    """The whole text."""

    text: str
    logprobs: list[ContentLogprob]


class ReasoningDelta(ContentEvent, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """Reasoning that one token has settled."""

    delta: str


class ReasoningDone(ContentEvent, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """The whole reasoning."""

    text: str


class ArgumentsDelta(
    DetailEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    """Arguments that one token has settled."""

    delta: str


class ArgumentsDone(
    DetailEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    """The whole arguments."""

    name: str
    arguments: str


class CustomInputDelta(
    DetailEvent, frozen=True, kw_only=True, tag="response.custom_tool_call_input.delta"
):
    """Input of a custom tool that one token has settled."""

    delta: str


class CustomInputDone(
    DetailEvent, frozen=True, kw_only=True, tag="response.custom_tool_call_input.done"
):
    """The whole input of a custom tool."""

    input: str


class ErrorEvent(ResponseEvent, frozen=True, kw_only=True, tag="error"):
    """Why a stream ends before its response. It has the number of the event before, behind which
    the stream can be joined again."""

    code: str
    message: str
    param: str | None = None


EVENTS: tuple[type[ResponseEvent], ...] = (
    ResponseCreated,
    ResponseQueued,
    ResponseInProgress,
    ResponseCompleted,
    ResponseIncomplete,
    ResponseFailed,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    TextDelta,
    TextDone,
    ReasoningDelta,
    ReasoningDone,
    ArgumentsDelta,
    ArgumentsDone,
    CustomInputDelta,
    CustomInputDone,
    ErrorEvent,
)


def name_of(kind: type[ResponseEvent]) -> str:
    """Returns the `type` of an event, and its name as a server-sent event."""
    return str(kind.__struct_config__.tag)
