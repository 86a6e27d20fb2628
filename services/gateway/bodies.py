"""The bodies of our own answers and events. The API's description is made from these types.

A field that may be UNSET is sent only when it was asked for.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from shardline.contract.chat import ToolCall
from shardline.contract.decision import Decision
from shardline.contract.job import (
    FinishReason,
    Job,
    JobState,
    JobSummary,
    PromptLogprob,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from shardline.contract.retry_policy import RetryPolicy
from shardline.store.pipelines import LivePipeline
from shardline.store.statistics.costs import Cost


class ErrorFields(msgspec.Struct, frozen=True, kw_only=True):
    """`param` names the field of the request, `code` is for programs, `job_id` names a job that
    continues."""

    message: str
    type: str
    param: str | None
    code: str
    job_id: UUID | UnsetType = UNSET


class Error(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every error, in OpenAI's form."""

    error: ErrorFields


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What of the prompt was found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What of a chat's completion is reasoning."""

    reasoning_tokens: int


class CompletionUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts as OpenAI reports them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @classmethod
    def of(cls, usage: Usage) -> CompletionUsage:
        """A job's usage with its total, as OpenAI reports it."""
        counts = msgspec.convert(usage, cls, from_attributes=True)
        if usage.cached_tokens is not None:
            details = PromptTokensDetails(cached_tokens=usage.cached_tokens)
            counts = replace(counts, prompt_tokens_details=details)
        if usage.reasoning_tokens is not None:
            thought = CompletionTokensDetails(reasoning_tokens=usage.reasoning_tokens)
            counts = replace(counts, completion_tokens_details=thought)
        return counts


class JobDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of a job, which follow its first `start` ones."""

    start: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | UnsetType = UNSET


class StreamInterruption(Error, frozen=True, kw_only=True):
    """Why a stream of events ends before its job, and where to join it again."""

    after: str


class JobAccepted(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="job"):
    """A job with a committed row."""

    id: UUID
    model: str
    state: JobState


class JobCancelling(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="job"):
    """The answer to a cancel; `cancel_requested` is false when the job had already ended
    otherwise."""

    id: UUID
    state: JobState
    cancel_requested: bool


class JobHead(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="job"):
    """The fields of a job that lists show too."""

    id: UUID
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


class JobListed(JobHead, frozen=True, kw_only=True):
    """A job in a list, without the fields that may be megabytes."""

    waits_for_parents: bool
    prompt_start: str | None
    finish_reason: FinishReason | None
    usage: CompletionUsage | None

    @classmethod
    def of(cls, job: JobSummary) -> JobListed:
        """The summary of a job, as lists show it."""
        listed = msgspec.convert(job, cls, from_attributes=True)
        return listed if job.usage is None else replace(listed, usage=CompletionUsage.of(job.usage))


class JobList(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """One page; its `next` is `after` of the following one."""

    data: list[JobListed]
    has_more: bool
    next: str | None


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """The completion as it was committed."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: CompletionUsage
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_logprobs: tuple[PromptLogprob | None, ...] | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    decision: Decision | None
    embedding: tuple[float, ...] | None
    score: float | None
    exact: bool
    timings: dict[str, float]
    provenance: dict[str, Any]


class JobDocument(JobHead, frozen=True, kw_only=True):
    """A job, with its result once that is committed."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...] | None
    params: SamplingParams
    seed: int
    metadata: dict[str, Any]
    attempts: int
    retry: RetryPolicy | None
    next_attempt_at: datetime | None
    depends_on: tuple[Any, ...] | None
    on_parent_failure: str
    waits_for: tuple[UUID, ...]
    result: JobResult | None

    @classmethod
    def of(cls, job: Job) -> JobDocument:
        """The whole job, as its readers see it."""
        document = msgspec.convert(job, cls, from_attributes=True)
        if document.result is None or job.result is None:
            return document
        usage = CompletionUsage.of(job.result.usage)
        return replace(document, result=replace(document.result, usage=usage))


class CostList(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """What jobs took, by what was asked for; `day`, `model` and `tenant` are null where
    jobs are not grouped by them."""

    data: list[Cost]


class ModelCard(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="model"):
    """A model that a stage has registered, or an adapter of it: as OpenAI's and as Anthropic's
    clients read it."""

    id: str
    type: Literal["model"] = "model"
    display_name: str
    created: int
    created_at: datetime
    lifecycle: Literal["active"] = "active"
    owned_by: Literal["shardline"]
    root: str
    """The model itself, also of an adapter."""
    parent: str | None
    max_model_len: int
    task: str
    """generate, embed or score."""
    system_fingerprint: str
    ready: bool


class ModelList(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """All registered models, on one page."""

    data: list[ModelCard]
    has_more: Literal[False] = False
    first_id: str | None
    last_id: str | None


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a process that is alive."""

    status: Literal["ok"]


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """The version of the gateway's process."""

    version: str


class ModelReadiness(msgspec.Struct, frozen=True, kw_only=True):
    """The pipelines of one model; `seats` counts those of ready pipelines."""

    ready: bool
    seats: int
    pipelines: list[LivePipeline]


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """A caller without an API key gets `ready` alone."""

    ready: bool
    reason: str | UnsetType = UNSET
    models: dict[str, ModelReadiness] | UnsetType = UNSET
