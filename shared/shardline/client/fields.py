"""The keyword arguments of `submit`, for editors and type checkers. Knows no limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict
from uuid import UUID

from shardline.contract.chat import Message, Tool
from shardline.contract.decision import Question
from shardline.contract.job import ReasoningEffort
from shardline.contract.parents.parent_job import ParentJob
from shardline.contract.retry_policy import RetryPolicy
from shardline.contract.structured_output import StructuredOutput
from shardline.contract.tool_choice import ToolChoice


class JobFields(TypedDict, total=False):
    """Every field of a request but `model` and `prompt`. Defaults and limits are in
    docs/jobs.md."""

    messages: Sequence[Message | Mapping[str, Any]] | None
    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop: list[str] | tuple[str, ...]
    stop_token_ids: list[int] | tuple[int, ...]
    include_stop_str_in_output: bool
    ignore_eos: bool
    logit_bias: Mapping[int, float] | Mapping[str, float]
    allowed_token_ids: list[int] | tuple[int, ...] | None
    bad_words: list[str] | tuple[str, ...]
    skip_special_tokens: bool
    chat_template_kwargs: Mapping[str, bool | int | str | None]
    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool | None
    truncate_prompt_tokens: int | None
    question: Question | Mapping[str, Any] | None
    document: str | None
    dimensions: int | None
    prompt_name: str | None
    structured_outputs: StructuredOutput | Mapping[str, Any] | None
    tools: Sequence[Tool | Mapping[str, Any]]
    tool_choice: ToolChoice | Mapping[str, Any] | None
    parallel_tool_calls: bool
    reasoning_effort: ReasoningEffort | None
    thinking_token_budget: int | None
    include_reasoning: bool
    logprobs: int | None
    prompt_logprobs: int | None
    seed: int | None
    exact: bool
    adapter: str | None
    id: UUID | str | None
    idempotency_key: str | None
    priority: int
    deadline_s: float | None
    delay_s: float
    flexible: Literal["price", "carbon"] | None
    max_crashes: int
    retry: RetryPolicy | Mapping[str, Any] | None
    depends_on: Sequence[ParentJob | Mapping[str, Any]] | None
    on_parent_failure: Literal["fail", "run"]
    metadata: dict[str, Any]
    tenant: str
    traceparent: str | None
