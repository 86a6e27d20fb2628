"""The bodies of OpenAI's routes. The API's description is made from these types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from services.gateway.bodies import CompletionUsage
from services.gateway.openai.neutral_fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL
from services.gateway.openai.response_format import JsonObjectFormat, ResponseFormat
from services.gateway.openai.service_tier import ServiceTier, tier_used
from shardline.contract.chat import Message, ToolCall
from shardline.contract.choices import MAX_CHOICES, NumChoices
from shardline.contract.job import (
    INTERACTIVE_PRIORITY,
    MAX_TOKENS,
    FinishReason,
    JobRequest,
    NumLogprobs,
    Priority,
    Prompt,
    SamplingParams,
)
from shardline.contract.tool_choice import callable_tools

DEFAULT_COMPLETION_TOKENS = 16
"""Of a request to /v1/completions without a number: as OpenAI and vLLM have it."""

NO_LIMIT = -1
"""Of `max_tokens`, as other servers write it."""

Length = Annotated[int, Meta(ge=NO_LIMIT, le=MAX_TOKENS, description="-1: all that fit")]


_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPTS = {
    "anyOf": [
        _TEXT,
        _IDS,
        *({"type": "array", "items": one, "maxItems": MAX_CHOICES} for one in (_TEXT, _IDS)),
    ]
}
"""The forms of a completion's prompt, for the API's description."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Usage that a stream reports with its chunks."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """vLLM's and SGLang's: each chunk has its choice's usage so far, if `include_usage` is set."""


class OpenAiRequest(JobRequest, frozen=True, kw_only=True):
    """A job with a caller on the line, and how it is answered."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]]
    """Fields without effect, and their values."""
    takes_what_fits: ClassVar[bool] = False
    """A `max_tokens` over what the prompt leaves is lowered to it instead of refused."""
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    """Another name of `max_tokens`."""
    n: NumChoices = 1
    """Completions of each prompt; each is a separate job."""
    priority: Priority = INTERACTIVE_PRIORITY
    service_tier: ServiceTier | None = None
    """A priority by OpenAI's names."""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    response_format: ResponseFormat | None = None
    question: None = None
    """`/v1/decisions` and `/v1/jobs` take them."""
    depends_on: None = None
    """`/v1/jobs` takes them: here a caller would keep its connection open while other jobs run."""
    # `/v1/embeddings`, `/v1/score` and `/v1/jobs` take these.
    document: None = None
    dimensions: None = None
    prompt_name: None = None

    @property
    def stored(self) -> Mapping[str, Any] | None:
        """What a stored completion shows and its row lacks; None: it is not stored."""
        return None

    @property
    def field_names(self) -> Mapping[str, str]:
        """Fields of its job, and what this request calls them."""
        names: dict[str, str] = {}
        if self.max_tokens is None and self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if self.response_format is not None:
            form = self.response_format
            place = "json_schema.schema"
            if isinstance(form, JsonObjectFormat):
                place = form.schema_field
            names["structured_outputs.json"] = f"response_format.{place}"
            names["structured_outputs"] = "response_format"
        return names

    @property
    def length(self) -> int | None:
        """The number of tokens under either name."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def params(self) -> SamplingParams:
        """The sampling part alone, in a job's words."""
        length = self.length
        # A job generates a token also where none is shown.
        max_tokens = None if length is None or length == NO_LIMIT else max(length, 1)
        output = self.structured_outputs
        if self.response_format is not None:
            called = callable_tools(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)
            # A required call leaves no content.
            output = None if called.is_required else self.response_format.structured()
        return msgspec.structs.replace(
            super().params(), max_tokens=max_tokens, structured_outputs=output
        )


class CompletionRequest(OpenAiRequest, frozen=True, kw_only=True):
    """The body of `POST /v1/completions`. `max_tokens` is 16 by default."""

    neutral = COMPLETION_NEUTRAL
    prompt: Annotated[Prompt, Meta(extra_json_schema=PROMPTS)]
    """A list of prompts is a request for each of them."""
    messages: None = None
    echo: bool = False
    """The text begins with the prompt's."""


class ThinkingSwitch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether the model thinks before it answers, as DeepSeek's clients say it."""

    type: Literal["enabled", "disabled"]


class ChatCompletionRequest(OpenAiRequest, frozen=True, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    neutral = CHAT_NEUTRAL
    prompt: None = None
    messages: tuple[Message, ...]
    logprobs: bool = False
    top_logprobs: NumLogprobs = 0
    store: bool = False
    """It is found under `GET /v1/chat/completions` until it is deleted there."""
    enable_thinking: bool | None = None
    """Another place of the variable in `chat_template_kwargs`."""
    thinking: ThinkingSwitch | None = None
    """Sets the variables `enable_thinking` and `thinking` in `chat_template_kwargs`."""

    @property
    def stored(self) -> Mapping[str, Any] | None:
        """What a stored completion shows and its row lacks; None: it is not stored."""
        if not self.store:
            return None
        return {} if self.service_tier is None else {"service_tier": tier_used(self.service_tier)}

    def params(self) -> SamplingParams:
        """The sampling part alone, in a job's words."""
        logprobs = self.top_logprobs if self.logprobs else None
        return msgspec.structs.replace(super().params(), logprobs=logprobs)


class AnswerHead(msgspec.Struct, frozen=True, kw_only=True, tag_field="object"):
    """Fields that every answer and every chunk of one request repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: ServiceTier | UnsetType = UNSET
    """There if the request had one."""


ChatFinishReason = Literal["stop", "length", "tool_calls"]
TokenIds = tuple[int, ...] | UnsetType
"""There with `return_token_ids`; those of the prompt where vLLM's clients look for them."""


class TextLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a completion: each list has one entry per token. The first token of an
    echoed prompt follows nothing, and has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class RankedLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token of a prompt, or an alternative to it; `rank` is its place among all tokens."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, RankedLogprob] | None] | UnsetType | None
"""There with `prompt_logprobs`, in vLLM's form: for each token, null for the first, by token
id."""


class NamedLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One token. Its bytes may be no whole character; a token that is no part of the text has
    none."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(NamedLogprob, frozen=True, kw_only=True):
    """An output token with its alternatives, likeliest first."""

    top_logprobs: list[NamedLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a chat completion."""

    content: list[ContentLogprob]
    refusal: None


class CompletionChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """New text of a completion."""

    index: int
    finish_reason: FinishReason | None
    text: str
    logprobs: TextLogprobs | None
    token_ids: TokenIds = UNSET
    prompt_token_ids: TokenIds = UNSET


class CompletionChoice(CompletionChunkChoice, frozen=True, kw_only=True):
    """One choice of a completion."""

    finish_reason: FinishReason
    prompt_logprobs: PromptLogprobs = UNSET


class Completion(AnswerHead, frozen=True, kw_only=True, tag="text_completion"):
    """What `POST /v1/completions` answers when it does not stream."""

    choices: list[CompletionChoice]
    usage: CompletionUsage


class CompletionChunk(AnswerHead, frozen=True, kw_only=True, tag="text_completion"):
    """One event of a streamed completion. The last one has no choices if the usage was asked
    for."""

    choices: list[CompletionChunkChoice]
    usage: CompletionUsage | UnsetType | None = UNSET


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    """None if the model has made calls and written nothing else."""
    refusal: None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """The reasoning again, where other clients look for it."""
    tool_calls: tuple[ToolCall, ...] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a chat completion."""

    index: int
    finish_reason: ChatFinishReason
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    token_ids: TokenIds = UNSET


class ChatCompletion(AnswerHead, frozen=True, kw_only=True, tag="chat.completion"):
    """What `POST /v1/chat/completions` answers when it does not stream."""

    choices: list[ChatChoice]
    prompt_token_ids: TokenIds = UNSET
    prompt_logprobs: PromptLogprobs = UNSET
    usage: CompletionUsage


class FunctionCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a function, or the next part of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ChatToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The next part of call number `index`; the first one has its id, type and name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCallDelta


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The next part of the model's message; the first one has the role and no text."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ChatToolCallDelta, ...] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """New text of a chat completion."""

    index: int
    finish_reason: ChatFinishReason | None
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    token_ids: TokenIds = UNSET


class ChatChunk(AnswerHead, frozen=True, kw_only=True, tag="chat.completion.chunk"):
    """One event of a streamed chat. The last one has no choices if the usage was asked for."""

    choices: list[ChatChunkChoice]
    prompt_token_ids: TokenIds = UNSET
    usage: CompletionUsage | UnsetType | None = UNSET
