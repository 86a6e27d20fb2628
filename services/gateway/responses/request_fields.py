"""The fields of `POST /v1/responses` that no other door has. The API's description is made from
these types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.openai.response_format import object_of, schema_of
from services.gateway.openai.service_tier import ServiceTier
from services.gateway.responses.custom_tools import InputFormat
from services.gateway.responses.input_items import SentItems
from services.gateway.responses.tools import (
    ResponseToolChoice,
    ResponseTools,
    custom_formats_of,
    descriptions_of,
    namespaces_of,
)
from shardline.contract.job import MAX_TOKENS, NumLogprobs, ReasoningEffort
from shardline.contract.structured_output import StructuredOutput, closed

LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
ShortText = Annotated[str, Meta(max_length=512)]


class PlainFormat(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"
):
    """Any text."""


class ObjectFormat(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="type",
    tag="json_object",
):
    """Any JSON object, or as llama.cpp has it, JSON of a schema."""

    schema: dict[str, Any] | None = None


class SchemaFormat(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="json_schema",
):
    """JSON of a schema. Unless it is `strict`, keywords that no grammar holds do not count."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


TextFormat = PlainFormat | ObjectFormat | SchemaFormat


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the text must be."""

    format: TextFormat = PlainFormat()
    verbosity: Literal["medium"] | None = None

    def structured(self) -> StructuredOutput | None:
        """Returns it as a job has it."""
        if isinstance(self.format, SchemaFormat):
            return schema_of(closed(self.format.schema), self.format.strict)
        if not isinstance(self.format, ObjectFormat):
            return None
        schema = self.format.schema
        return object_of(None if schema is None else closed(schema))


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the model thinks. Its reasoning always comes whole, so a `summary` adds nothing."""

    context: Literal["auto"] | None = None
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    mode: Literal["standard"] | None = None


class StreamedOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's options of a stream. Chunks have no obfuscation."""

    include_obfuscation: bool = False


class StoredOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that the answer repeats and the job lacks. The response's row keeps them."""

    background: bool = False
    include: tuple[Includable, ...] = ()
    max_tool_calls: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    prompt_cache_key: ShortText | None = None
    reasoning: ReasoningOptions = ReasoningOptions()
    safety_identifier: ShortText | None = None
    service_tier: ServiceTier = "auto"
    store: bool = True
    """False: no request finds the response afterwards. Its job is kept like every other."""
    text: TextOptions = TextOptions()
    top_logprobs: NumLogprobs = 0
    truncation: Literal["auto", "disabled"] = "disabled"
    """auto: the oldest turns of the input are left out until the rest fits."""
    user: ShortText | None = None


class KeptOptions(StoredOptions, frozen=True, kw_only=True):
    """All options in the response's row, which the job lacks."""

    namespaces: dict[str, str] = {}
    """Of functions that have one, by their names in the job."""
    descriptions: dict[str, str] = {}
    """Of namespaces that have one, by their names."""
    custom_formats: dict[str, InputFormat] = {}
    """Of custom tools, by their names."""


class ResponseFields(StoredOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a request but what `JobRequest` has."""

    client_metadata: dict[str, Any] = {}
    """Without effect: Codex tells of itself."""
    input: str | SentItems
    instructions: str | None = None
    """Of this response alone: the next one does not have them."""
    max_output_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    parallel_tool_calls: bool = True
    previous_response_id: Annotated[str, Meta(max_length=64)] | None = None
    prompt_cache_options: dict[str, Any] = {}
    """Without effect: equal beginnings are found without being marked."""
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = None
    stream: bool = False
    stream_options: StreamedOptions = StreamedOptions()
    tool_choice: ResponseToolChoice = "auto"
    tools: ResponseTools = ()

    def options(self) -> KeptOptions:
        """Returns what is kept of it."""
        names = StoredOptions.__struct_fields__
        values = {name: getattr(self, name) for name in names}
        return KeptOptions(
            **values,
            namespaces=namespaces_of(self.tools),
            descriptions=descriptions_of(self.tools),
            custom_formats=custom_formats_of(self.tools),
        )

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probabilities were asked for."""
        return LOGPROBS in self.include
