"""The documents of `/v1/responses`: a response, its deletion. The API's description is made from
these types."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from services.gateway.openai.service_tier import ServiceTier
from services.gateway.responses.output_items import OutputItem
from services.gateway.responses.request_fields import ReasoningOptions, TextOptions
from services.gateway.responses.tools import AnyTool, ResponseToolChoice

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response has failed."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response is shorter than the model would have it."""

    reason: Literal["max_output_tokens"]


class InputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What of the input was found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What of the output is reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts as OpenAI reports them here."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseDocument(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="response"
):
    """A response, with its output once it has ended. Times are seconds since 1970."""

    id: str
    created_at: int
    completed_at: int | None
    status: Status
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningOptions
    safety_identifier: str | None
    service_tier: ServiceTier
    store: bool
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    text: TextOptions
    tool_choice: ResponseToolChoice
    tools: list[AnyTool]
    top_logprobs: int
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, Any]


class ResponseDeleted(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="response"
):
    """The answer to a deletion."""

    id: str
    deleted: Literal[True] = True


class InputTokens(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="response.input_tokens"
):
    """What `POST /v1/responses/input_tokens` answers."""

    input_tokens: int
