"""The requests of Anthropic's routes. The API's description is made from these types.

What marks a place for Anthropic's cache is taken and changes nothing: prefixes are cached by
themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.anthropic.server_blocks import AnyServerBlock
from services.gateway.openai.neutral_fields import ANY_TEXT
from shardline.contract.chat import MAX_TOOL_NAME_CHARS
from shardline.contract.job import MAX_TOKENS, Probability

KEEP_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}
"""Clears nothing: thoughts are what the caller sends."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "standard_only"),
    "inference_geo": ("global",),
    "speed": ("standard",),
    "container": (),
    "context_management": ({}, {"edits": []}, {"edits": [KEEP_THINKING]}),
    "mcp_servers": ([],),
    "diagnostics": (),
    "user_profile_id": (ANY_TEXT,),
}
"""Fields without effect, and their values."""

ToolName = Annotated[str, Meta(pattern=rf"^[A-Za-z0-9_.-]{{1,{MAX_TOOL_NAME_CHARS}}}$")]
CallId = Annotated[str, Meta(min_length=1, max_length=256)]


class CacheControl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A place for Anthropic's cache."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None


def text_of(content: str | Sequence[TextualInput]) -> str:
    """Returns a content as one text; parts are joined by line breaks, as those of chats are."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class InputBlock(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"
):
    """A part of a message's content."""

    cache_control: CacheControl | None = None


class TextInput(InputBlock, frozen=True, kw_only=True, tag="text"):
    """Some text."""

    text: str
    citations: tuple[dict[str, Any], ...] | None = None
    """Without effect: an answer of Anthropic's that is sent back has them."""


class CitationsSwitch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether answers are to cite a source: none does."""

    enabled: Literal[False] = False


class DocumentSource(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"
):
    """Says where the text of a document is."""


class PlainSource(DocumentSource, frozen=True, kw_only=True, tag="text"):
    """A file of text."""

    media_type: Literal["text/plain"]
    data: str

    @property
    def text(self) -> str:
        """Returns its text."""
        return self.data


class ContentSource(DocumentSource, frozen=True, kw_only=True, tag="content"):
    """Parts of text."""

    content: str | tuple[TextInput, ...]

    @property
    def text(self) -> str:
        """Returns them as one text."""
        return text_of(self.content)


class DocumentInput(InputBlock, frozen=True, kw_only=True, tag="document"):
    """A document of text. Its title and context come before it."""

    source: PlainSource | ContentSource
    title: str | None = None
    context: str | None = None
    citations: CitationsSwitch | None = None

    @property
    def text(self) -> str:
        """Returns what the model reads of it."""
        return "\n".join(one for one in (self.title, self.context, self.source.text) if one)


class SearchResultInput(InputBlock, frozen=True, kw_only=True, tag="search_result"):
    """What a search of the caller's has found. Its title and source come before it."""

    source: str
    title: str
    content: tuple[TextInput, ...]
    citations: CitationsSwitch | None = None

    @property
    def text(self) -> str:
        """Returns what the model reads of it."""
        return "\n".join(one for one in (self.title, self.source, text_of(self.content)) if one)


TextualInput = TextInput | DocumentInput | SearchResultInput
"""What the model reads as text."""


class ThinkingInput(InputBlock, frozen=True, kw_only=True, tag="thinking"):
    """What the model thought in an answer before, with a signature that is not checked."""

    thinking: str
    signature: str = ""


class RedactedThinkingInput(InputBlock, frozen=True, kw_only=True, tag="redacted_thinking"):
    """Thoughts that only Anthropic can read: they are left out."""

    data: str


class ToolUseInput(InputBlock, frozen=True, kw_only=True, tag="tool_use"):
    """A call that the model has made."""

    id: CallId
    name: ToolName
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


class ToolResultInput(InputBlock, frozen=True, kw_only=True, tag="tool_result"):
    """What a call has given."""

    tool_use_id: CallId
    content: str | tuple[TextualInput, ...] = ""
    is_error: bool = False


AnyInput = (
    TextualInput
    | ThinkingInput
    | RedactedThinkingInput
    | ToolUseInput
    | ToolResultInput
    | AnyServerBlock
)


class Turn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The messages of one role. Consecutive turns of one role are merged."""

    role: Literal["user", "assistant", "system"]
    content: str | tuple[AnyInput, ...]


class ClientTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool of the caller's; `input_schema` is a JSON schema."""

    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    input_examples: tuple[dict[str, Any], ...] = ()
    defer_loading: Literal[False] | None = None
    allowed_callers: tuple[Literal["direct"], ...] | None = None


class ToolChoiceInput(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"
):
    """Which tools the model may call."""

    disable_parallel_tool_use: bool = False


class AutoChoice(ToolChoiceInput, frozen=True, kw_only=True, tag="auto"):
    """Any of them, or none."""


class AnyChoice(ToolChoiceInput, frozen=True, kw_only=True, tag="any"):
    """One of them at least."""


class ToolChoiceByName(ToolChoiceInput, frozen=True, kw_only=True, tag="tool"):
    """This one."""

    name: ToolName


class NoChoice(ToolChoiceInput, frozen=True, kw_only=True, tag="none"):
    """None of them."""


Display = Literal["summarized", "omitted"] | None


class ThinkingEnabled(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="enabled",
):
    """The model thinks before it answers. Its thoughts count among `max_tokens`; no budget of their
    own holds."""

    budget_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    display: Display = None


class ThinkingAdaptive(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="adaptive",
):
    """The model decides."""

    display: Display = None


class ThinkingDisabled(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="disabled",
):
    """The model answers without thinking, where its chat template has a switch for that."""


Thinking = ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled


class MessageSchemaFormat(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="json_schema",
):
    """JSON of a schema."""

    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer, and the effort behind it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: MessageSchemaFormat | None = None


class MessageMetadata(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Kept as the job's metadata."""

    user_id: Annotated[str, Meta(max_length=512)] | None = None


class CountTokensBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/messages/count_tokens`: what makes the prompt."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    messages: Annotated[tuple[Turn, ...], Meta(min_length=1)]
    system: str | tuple[TextInput, ...] = ""
    tools: tuple[ClientTool, ...] = ()
    tool_choice: AutoChoice | AnyChoice | ToolChoiceByName | NoChoice = AutoChoice()
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: MessageSchemaFormat | None = None
    """An earlier place of `output_config.format`."""
    cache_control: CacheControl | None = None


class MessagesBody(CountTokensBody, frozen=True, kw_only=True):
    """The body of `POST /v1/messages`. A `max_tokens` over what the prompt leaves is lowered to
    it."""

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    stop_sequences: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(max_length=16)
    ] = ()
    temperature: Probability = 1.0
    top_p: Probability = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    metadata: MessageMetadata = MessageMetadata()
    stream: bool = False
