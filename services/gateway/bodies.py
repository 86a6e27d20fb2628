"""The bodies of answers and events: the API's description is made from them, and mypy holds their makers to them.

TypedDicts: an answer is a dict that is encoded at once. A field that is NotRequired is sent only when it was asked for.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, NotRequired, TypedDict
from uuid import UUID

from shardline.job import FinishReason, JobState, SamplingParams, TokenLogprob
from shardline.store.pipelines import LivePipeline


class ErrorFields(TypedDict):
    """`param` names the field of the request, `code` is for programs, `job_id` is of a job that goes on."""

    message: str
    type: str
    param: str | None
    code: str
    job_id: NotRequired[UUID]


class Error(TypedDict):
    """Every error, in OpenAI's form."""

    error: ErrorFields


class CompletionUsage(TypedDict):
    """As OpenAI counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AnswerHead(TypedDict):
    """What every answer and every chunk of one request repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class TokenFields(TypedDict, total=False):
    """With `return_token_ids`."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


class TextLogprobs(TypedDict):
    """Of completions: one place in each list for each token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class NamedLogprob(TypedDict):
    """One token; `bytes` is null for bytes that are no character by themselves."""

    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(NamedLogprob):
    """An output token with its alternatives, likeliest first."""

    top_logprobs: list[NamedLogprob]


class ChatLogprobs(TypedDict):
    """Of chats."""

    content: list[ContentLogprob]
    refusal: None


class CompletionChoice(TokenFields):
    """The only one."""

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
    """What the model said."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TokenFields):
    """The only one."""

    index: Literal[0]
    finish_reason: FinishReason
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(AnswerHead):
    """What `POST /v1/chat/completions` answers when it does not stream."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: CompletionUsage


class CompletionChunkChoice(TokenFields):
    """New text."""

    index: Literal[0]
    finish_reason: FinishReason | None
    text: str
    logprobs: TextLogprobs | None


class CompletionChunk(AnswerHead):
    """One event of a streamed completion. The last one has no choices if the usage was asked for."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: NotRequired[CompletionUsage | None]


class ChatDelta(TypedDict, total=False):
    """What the model says next; the role comes first, alone."""

    role: Literal["assistant"]
    content: str


class ChatChunkChoice(TokenFields):
    """New text."""

    index: Literal[0]
    finish_reason: FinishReason | None
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatChunk(AnswerHead):
    """One event of a streamed chat. The last one has no choices if the usage was asked for."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[CompletionUsage | None]


class JobDelta(TypedDict):
    """New tokens of a job: `start` were there before them."""

    start: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: NotRequired[tuple[TokenLogprob, ...]]


class Interrupted(Error):
    """Why a stream of events ends before its job, and where to join it again."""

    after: str


class JobAccepted(TypedDict):
    """The row is committed."""

    id: UUID
    object: Literal["job"]
    model: str
    state: JobState


class JobCancelling(TypedDict):
    """`cancel_requested` is false when the job had ended otherwise before."""

    id: UUID
    object: Literal["job"]
    state: JobState
    cancel_requested: bool


class JobHead(TypedDict):
    """What lists say of a job too."""

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
    """A job in a list: without what may be megabytes."""

    prompt_start: str | None
    finish_reason: FinishReason | None
    usage: CompletionUsage | None


class JobList(TypedDict):
    """A page; `next` is `after` of the one behind it."""

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


class ModelCard(TypedDict):
    """A model that a stage has registered."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["shardline"]
    max_model_len: int
    system_fingerprint: str
    ready: bool


class ModelList(TypedDict):
    """All of them."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(TypedDict):
    """This process answers."""

    status: Literal["ok"]


class ModelReadiness(TypedDict):
    """The pipelines of one model; `seats` of those that are ready."""

    ready: bool
    seats: int
    pipelines: list[LivePipeline]


class Description(TypedDict):
    """Of this API."""

    openapi: str
    info: dict[str, str]
    paths: dict[str, Any]
    components: dict[str, Any]


class Readiness(TypedDict):
    """Who sends no API key is told `ready` alone."""

    ready: bool
    reason: NotRequired[str]
    models: NotRequired[dict[str, ModelReadiness]]
