"""The bodies of answers and events: the API's description is made from them, and mypy holds their
makers to them.

TypedDicts: an answer is a dict that is encoded at once. A field that is NotRequired is sent only
when it was asked for.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, NotRequired, TypedDict
from uuid import UUID

from shardline.contract.job import FinishReason, JobState, SamplingParams, TokenLogprob
from shardline.store.pipelines import LivePipeline
from shardline.store.statistics.costs import Cost


class ErrorFields(TypedDict):
    """`param` names the field of the request, `code` is for programs, `job_id` names a job that
    continues."""

    message: str
    type: str
    param: str | None
    code: str
    job_id: NotRequired[UUID]


class Error(TypedDict):
    """The body of every error, in OpenAI's form."""

    error: ErrorFields


class PromptTokensDetails(TypedDict):
    """What of the prompt was found in the prefix cache."""

    cached_tokens: int


class CompletionUsage(TypedDict):
    """Token counts as OpenAI reports them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]


class AnswerHead(TypedDict):
    """Fields that every answer and every chunk of one request repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class TokenFields(TypedDict, total=False):
    """Fields that are there only with `return_token_ids`."""

    token_ids: tuple[int, ...]


class PromptFields(TypedDict, total=False):
    """The same, where vLLM's clients look for it: in a completion's choice, at the top of a chat's
    answer."""

    prompt_token_ids: tuple[int, ...]


class TextLogprobs(TypedDict):
    """Log-probabilities of a completion: each list has one entry per token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class NamedLogprob(TypedDict):
    """One token. Its bytes may be no whole character; a token that is no part of the text has
    none."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(NamedLogprob):
    """An output token with its alternatives, likeliest first."""

    top_logprobs: list[NamedLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat completion."""

    content: list[ContentLogprob]
    refusal: None


class CompletionChoice(TokenFields, PromptFields):
    """The only choice of a completion."""

    index: Literal[0]
    finish_reason: FinishReason
    text: str
    logprobs: TextLogprobs | None


class Completion(AnswerHead):
    """What `POST /v1/completions` answers when it does not stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: CompletionUsage


class AssistantMessage(TypedDict):
    """The model's message."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TokenFields):
    """The only choice of a chat completion."""

    index: Literal[0]
    finish_reason: FinishReason
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(AnswerHead, PromptFields):
    """What `POST /v1/chat/completions` answers when it does not stream."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: CompletionUsage


class CompletionChunkChoice(TokenFields, PromptFields):
    """New text of a completion."""

    index: Literal[0]
    finish_reason: FinishReason | None
    text: str
    logprobs: TextLogprobs | None


class CompletionChunk(AnswerHead):
    """One event of a streamed completion. The last one has no choices if the usage was asked
    for."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: NotRequired[CompletionUsage | None]


class ChatDelta(TypedDict, total=False):
    """The next part of the model's message; the first one has the role alone."""

    role: Literal["assistant"]
    content: str


class ChatChunkChoice(TokenFields):
    """New text of a chat completion."""

    index: Literal[0]
    finish_reason: FinishReason | None
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatChunk(AnswerHead, PromptFields):
    """One event of a streamed chat. The last one has no choices if the usage was asked for."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[CompletionUsage | None]


class JobDelta(TypedDict):
    """New tokens of a job, which follow its first `start` ones."""

    start: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: NotRequired[tuple[TokenLogprob, ...]]


class Interrupted(Error):
    """Why a stream of events ends before its job, and where to join it again."""

    after: str


class JobAccepted(TypedDict):
    """A job with a committed row."""

    id: UUID
    object: Literal["job"]
    model: str
    state: JobState


class JobCancelling(TypedDict):
    """The answer to a cancel; `cancel_requested` is false when the job had already ended
    otherwise."""

    id: UUID
    object: Literal["job"]
    state: JobState
    cancel_requested: bool


class JobHead(TypedDict):
    """The fields of a job that lists show too."""

    id: UUID
    object: Literal["job"]
    state: JobState
    model: str
    tenant: str
    priority: int
    created_at: datetime
    finished_at: datetime | None
    cancel_requested: bool
    crashes: int
    replay_of: UUID | None
    error: dict[str, Any] | None


class JobListed(JobHead):
    """A job in a list, without the fields that may be megabytes."""

    prompt_start: str | None
    finish_reason: FinishReason | None
    usage: CompletionUsage | None


class JobList(TypedDict):
    """One page; its `next` is `after` of the following one."""

    object: Literal["list"]
    data: list[JobListed]
    has_more: bool
    next: str | None


class JobResult(TypedDict):
    """The completion as it was committed."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: CompletionUsage
    logprobs: tuple[TokenLogprob, ...] | None
    exact: bool
    timings: dict[str, float]
    provenance: dict[str, Any]


class JobDocument(JobHead):
    """A job, with its result once that is committed."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...] | None
    params: SamplingParams
    seed: int
    metadata: dict[str, Any]
    result: JobResult | None


class CostList(TypedDict):
    """What jobs took, by what was asked for; `day`, `model` and `tenant` are null where
    jobs are not grouped by them."""

    object: Literal["list"]
    data: list[Cost]


class ModelCard(TypedDict):
    """A model that a stage has registered, or an adapter of it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["shardline"]
    parent: str | None
    max_model_len: int
    system_fingerprint: str
    ready: bool


class ModelList(TypedDict):
    """All registered models."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(TypedDict):
    """The answer of a process that is alive."""

    status: Literal["ok"]


class ModelReadiness(TypedDict):
    """The pipelines of one model; `seats` counts those of ready pipelines."""

    ready: bool
    seats: int
    pipelines: list[LivePipeline]


class Description(TypedDict):
    """The OpenAPI description of this API."""

    openapi: str
    info: dict[str, str]
    paths: dict[str, Any]
    components: dict[str, Any]


class Readiness(TypedDict):
    """A caller without an API key gets `ready` alone."""

    ready: bool
    reason: NotRequired[str]
    models: NotRequired[dict[str, ModelReadiness]]
