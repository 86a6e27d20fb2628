"""The job: what a producer asks for, the states it passes, what comes back. Knows no database and
no transport."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from shardline.base.trace_context import MAX_TRACEPARENT_CHARS, TRACEPARENT
from shardline.contract.chat import Message, ToolCall
from shardline.contract.decision import Decision, Question
from shardline.contract.parents.parent_job import OnParentFailure, Parents
from shardline.contract.retry_policy import RetryPolicy
from shardline.contract.structured_output import StructuredOutput
from shardline.contract.tool_choice import ToolChoice, Tools

PRIORITIES = range(10)
"""0 is served first."""

INTERACTIVE = range(4)
"""Priorities of jobs for which somebody waits: a share of every head's seats is theirs alone."""

INTERACTIVE_PRIORITY = 3
"""Of a request with a caller on the line, if it names none."""

DEFAULT_PRIORITY = 5
DEFAULT_TENANT = "default"
DEFAULT_CRASHES = 3
MAX_CRASHES = 100
"""That a job may ask for. An installation has its own ceiling: each crash costs everybody a
restart."""

MAX_TOKENS = 1_000_000
MAX_DOCUMENT_CHARS = 1 << 20
MAX_DIMENSIONS = 65_536
"""Of a vector."""
PROMPT_END_TOKENS = 16
"""Of a prompt's last tokens: what a completion is decoded behind. Its first space, or a character
that both make, hangs on them."""
MAX_METADATA_BYTES = 64 << 10
"""As JSON. It is kept with every job, and read with every look at it."""

MAX_SEED = 2**63 - 1
ALL_THAT_FIT = -1
"""Of `truncate_prompt_tokens`."""

NO_TOP_K = -1
"""No limit, as other servers write it."""

DRAWN_SEED = -1
"""A seed as other servers spell that there is none."""

LEAST_TOP_P = 1e-9
"""Stands for 0: no vocabulary is so large that its likeliest token holds less."""

ADAPTER_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
"""It is a folder's name, and follows a colon in `model:adapter`."""


class JobState(StrEnum):
    """queued → running → succeeded | failed | cancelled | expired, and running → queued."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def terminal(self) -> bool:
        """True when the state never changes again."""
        return self not in (JobState.QUEUED, JobState.RUNNING)


class FinishReason(StrEnum):
    """Why a completion is as long as it is."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


# The limits of every field, at every door and for rows of SQL. Whatever is within them fits what
# reads it: Postgres's types, the wire's, and the sampler's arithmetic in float32.
Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
BadWord = Annotated[str, Meta(min_length=1, max_length=128)]
VariableName = Annotated[str, Meta(min_length=1, max_length=64)]
VariableNumber = Annotated[int, Meta(ge=-(2**53), le=2**53)]
VariableText = Annotated[str, Meta(max_length=1024)]
Variable = bool | VariableNumber | VariableText | None
AdapterName = Annotated[str, Meta(pattern=ADAPTER_NAME, max_length=128)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
NumLogprobs = Annotated[int, Meta(ge=0, le=20)]
MAX_PROMPT_LOGPROBS = 32_768
"""Tokens of a prompt times 1 and their alternatives: some 4 MB in a head, and 1 MB in a row."""
Priority = Annotated[int, Meta(ge=0, le=9)]
Traceparent = Annotated[str, Meta(pattern=TRACEPARENT, max_length=MAX_TRACEPARENT_CHARS)]


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """How a completion is generated. Stored as `jobs.params`, sent to the tail in the StepPlan's
    opens.

    temperature 0 is greedy. top_k 0 or -1 and top_p 1 mean no limit; top_p 0 leaves the likeliest
    token. `seed` is drawn when the job is stored if absent or -1; other negative seeds count modulo
    2⁶³. `logprobs` is the number of alternatives for each output token, `prompt_logprobs` for each
    token of the prompt; None means no logprobs at all. `adapter` names a LoRA adapter of the model;
    a door takes it from `model:adapter` too.
    """

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    top_p: Probability = 1.0
    min_p: Probability = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10.0)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    stop: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(max_length=16)
    ] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=64)] = ()
    include_stop_str_in_output: bool = False
    """The stop string, or the stop token's text, ends the text."""
    ignore_eos: bool = False
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=1024)] = {}
    """Added to the tokens' logits before penalties."""
    allowed_token_ids: (
        Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=1024)] | None
    ) = None
    """No other token is chosen, not even one that would end the completion."""
    bad_words: Annotated[tuple[BadWord, ...], Meta(max_length=64)] = ()
    """Texts; their tokens never occur in sequence in the completion."""
    skip_special_tokens: bool = True
    """False: the text has the special tokens too, all but the one that ends it."""
    chat_template_kwargs: Annotated[dict[VariableName, Variable], Meta(max_length=16)] = {}
    """Variables of the model's chat template, such as `enable_thinking`."""
    add_generation_prompt: bool = True
    """False: rendered messages do not end with the beginning of an answer."""
    continue_final_message: bool = False
    """The completion goes on with the last message, which is the assistant's."""
    add_special_tokens: bool | None = None
    """The tokenizer's around the prompt; None: around a text, but not around rendered messages."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=ALL_THAT_FIT, le=MAX_TOKENS)] | None = None
    """Only the prompt's last ones are read."""
    structured_outputs: StructuredOutput | None = None
    """What the text must be; it ends where it can only end."""
    question: Question | None = None
    """Answered with the probabilities of its options; no text is generated."""
    document: Annotated[str, Meta(min_length=1, max_length=MAX_DOCUMENT_CHARS)] | None = None
    """What a cross-encoder scores the prompt with."""
    dimensions: Annotated[int, Meta(ge=1, le=MAX_DIMENSIONS)] | None = None
    """To which an encoder's vector is cut; None: not at all."""
    prompt_name: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    """Of an encoder's prompts, which stand before a text; None: its default one."""
    tools: Tools = ()
    """What the model may call. With messages alone, as all that follows up to `logprobs`."""
    tool_choice: ToolChoice | None = None
    """None: auto."""
    parallel_tool_calls: bool = True
    """False: one call at most."""
    reasoning_effort: ReasoningEffort | None = None
    """A variable of the chat template; none: no thinking, where the template can leave it out."""
    thinking_token_budget: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    """Tokens of thinking, after which its end is forced. Not every model has a token for that."""
    include_reasoning: bool = True
    """False: answers leave the reasoning out; the row has it."""
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    seed: Annotated[int, Meta(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    exact: bool = False
    """Computed on exact rows of one exactness, or not at all."""
    adapter: AdapterName | None = None

    def __post_init__(self) -> None:
        """Write what other servers spell otherwise as the wire and the sampler know it."""
        if self.top_k == NO_TOP_K:
            force_setattr(self, "top_k", 0)
        if self.top_p == 0:
            force_setattr(self, "top_p", LEAST_TOP_P)
        if isinstance(self.seed, int) and self.seed < 0:
            force_setattr(self, "seed", None if self.seed == DRAWN_SEED else self.seed & MAX_SEED)

    def stop_ids(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """Tokens that end this completion."""
        return frozenset(self.stop_token_ids) | (
            frozenset() if self.ignore_eos else frozenset(eos_ids)
        )


Prompt = str | tuple[TokenId, ...]


class JobRequest(
    SamplingParams, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What every door accepts, as one flat JSON object: a prompt (text or token ids) or messages,
    and how to run it.

    `deadline_s` and `delay_s` count from acceptance, by Postgres's clock. A `flexible` job waits
    for the lowest rate that is known then, at most nine tenths of the time to its deadline.
    """

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    prompt: Prompt | None = None
    messages: tuple[Message, ...] | None = None
    id: UUID | None = None
    idempotency_key: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    priority: Priority = DEFAULT_PRIORITY
    deadline_s: Annotated[float, Meta(gt=0, le=31_536_000)] | None = None
    delay_s: Annotated[float, Meta(ge=0, le=31_536_000)] = 0.0
    flexible: Literal["price", "carbon"] | None = None
    max_crashes: Annotated[int, Meta(ge=0, le=MAX_CRASHES)] = DEFAULT_CRASHES
    retry: RetryPolicy | None = None
    depends_on: Parents | None = None
    """Jobs of the tenant that must have ended before: accepted ones, or earlier ones of the same
    call."""
    on_parent_failure: OnParentFailure = "fail"
    """run: the text of a parent that did not succeed is empty."""
    metadata: dict[str, Any] = {}
    tenant: Annotated[str, Meta(min_length=1, max_length=64)] = DEFAULT_TENANT
    traceparent: Traceparent | None = None

    @property
    def address(self) -> str:
        """What is to complete it: a model, or one of its adapters."""
        return address_of(self.model, self.adapter)

    def params(self) -> SamplingParams:
        """The sampling part alone."""
        return SamplingParams(
            **{name: getattr(self, name) for name in SamplingParams.__struct_fields__}
        )


def address_of(model: str, adapter: str | None) -> str:
    """How requests and lists name a model, or one of its adapters. A model's name may hold a colon
    too."""
    return model if adapter is None else f"{model}:{adapter}"


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one job."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    """Prompt tokens that were not computed: their KV was there. None where it is not known."""
    reasoning_tokens: int | None = None
    """Of a chat's completion: those before its reasoning ends. None where it is not known."""

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of one output token, and the most likely alternatives (id, logprob),
    best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of one token of a prompt, its place among all tokens, from 1 on, and
    the most likely alternatives (id, logprob), best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A completion with its usage, finish reason, timings (seconds) and provenance: one row of
    `results`."""

    job_id: UUID
    text: str
    """As generated, with the marks of reasoning and calls."""
    token_ids: tuple[int, ...]
    usage: Usage
    finish_reason: FinishReason
    exact: bool
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Of a question's answer the alternatives are all of its labels, in the options' order."""
    prompt_logprobs: tuple[PromptLogprob | None, ...] | None = None
    """One for each token of the prompt; None for the first, which follows nothing."""
    decision: Decision | None = None
    """The answer to the job's question."""
    embedding: tuple[float, ...] | None = None
    """The vector of the prompt, in float32, by a model that embeds."""
    score: float | None = None
    """Of prompt and document, in float32, by a cross-encoder."""
    reasoning: str | None = None
    """What the model thought, of a chat."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls in the text of a chat."""
    timings: dict[str, float] = {}
    provenance: dict[str, Any] = {}


class JobProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A job's output from token `start` on, as Postgres has it: its checkpoint, or its result once
    it has ended."""

    fence: int
    token_ids: tuple[int, ...] = ()
    start: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each of `token_ids`, where the job asked for them."""
    text: str | None = None
    """Of the whole output, not only from `start` on; set together with `state`."""
    state: JobState | None = None
    """Set once the job has ended and these are its last tokens."""
    finish_reason: FinishReason | None = None
    is_whole: bool = True
    """False for a page of a longer output: read again from its end."""
    params: SamplingParams = SamplingParams()
    max_tokens: int | None = None
    """None until the job is prepared; it has no output before."""
    prompt_end: tuple[int, ...] = ()
    """The prompt's last tokens, PROMPT_END_TOKENS at most, where they were asked for."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One job as a reader sees it: its row, with its result once that is committed."""

    id: UUID
    tenant: str
    model: str
    state: JobState
    priority: int
    created_at: datetime
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    params: SamplingParams = SamplingParams()
    seed: int = 0
    metadata: dict[str, Any] = {}
    finished_at: datetime | None = None
    cancel_requested: bool = False
    crashes: int = 0
    fence: int = 0
    retry: RetryPolicy | None = None
    next_attempt_at: datetime | None = None
    """Of a queued job: it does not begin before."""
    replay_of: UUID | None = None
    depends_on: tuple[Any, ...] | None = None
    """As its row has them."""
    on_parent_failure: str = "fail"
    waits_for: tuple[UUID, ...] = ()
    """Those of its parents that have not ended."""
    error: dict[str, Any] | None = None
    result: Result | None = None

    @property
    def attempts(self) -> int:
        """Returns how often a head has claimed it."""
        return self.fence


class JobSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One job in a list: what can be shown of it without its prompt and its completion, which may
    be megabytes."""

    id: UUID
    tenant: str
    model: str
    state: JobState
    priority: int
    created_at: datetime
    finished_at: datetime | None = None
    cancel_requested: bool = False
    crashes: int = 0
    replay_of: UUID | None = None
    waits_for_parents: bool = False
    error: dict[str, Any] | None = None
    prompt_start: str | None = None
    """The first 100 characters, of a chat those of its last message; None of a long chat."""
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    """Of its result, once it has one."""
