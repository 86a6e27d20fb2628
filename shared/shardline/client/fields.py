"""The keyword arguments of `submit`, for editors and type checkers. Knows no limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict
from uuid import UUID

from shardline.contract.chat import Message
from shardline.contract.structured_output import StructuredOutput


class JobFields(TypedDict, total=False):
    """Every field of a request but `model` and `prompt`. Defaults and limits are in
    docs/jobs.md."""

    messages: Sequence[Message | Mapping[str, str]] | None
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
    ignore_eos: bool
    skip_special_tokens: bool
    chat_template_kwargs: Mapping[str, bool | int | str | None]
    structured_outputs: StructuredOutput | Mapping[str, Any] | None
    logprobs: int | None
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
    metadata: dict[str, Any]
    tenant: str
    traceparent: str | None
