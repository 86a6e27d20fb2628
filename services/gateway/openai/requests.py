"""OpenAI's request bodies in every form that its clients send, as the types that describe them.

Other spellings are rewritten, fields without effect dropped. Knows no server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from msgspec.structs import replace

from services.gateway.field_names import renaming
from services.gateway.http.json_body import Document
from services.gateway.openai.bodies import (
    ChatCompletionRequest,
    CompletionRequest,
    OpenAiRequest,
    StreamOptions,
)
from services.gateway.openai.neutral_fields import STREAM_NEUTRAL, drop_neutral, without_echoes
from services.gateway.openai.service_tier import PRIORITIES
from shardline.base.errors import Invalid
from shardline.contract.request_parsing import check_request, parse_fields

RequestT = TypeVar("RequestT", bound=OpenAiRequest)


def completion_request(document: Document) -> CompletionRequest:
    """Parse the body of `POST /v1/completions` with one prompt. Raises Invalid. `logprobs` of a
    chat's form means none."""
    fields = _kept(_without_best_of(document), CompletionRequest.neutral)
    if "messages" in fields:
        remedy = "Send prompt, or use /v1/chat/completions"
        raise Invalid("messages", "completions take a prompt", remedy)
    if fields.get("logprobs") is False:
        del fields["logprobs"]
    request = _parse(fields, CompletionRequest)
    if request.echo and request.logprobs is not None:
        # The answer shows those of the prompt's tokens too.
        num_top = max(request.logprobs, request.prompt_logprobs or 0)
        request = replace(request, prompt_logprobs=num_top)
        _check_scores_whole(request, "echo")
    return request


def chat_request(document: Document) -> ChatCompletionRequest:
    """Parse the body of `POST /v1/chat/completions`. Raises Invalid."""
    fields = _kept(_without_best_of(document), ChatCompletionRequest.neutral)
    if "prompt" in fields:
        remedy = "Send messages, or use /v1/completions"
        raise Invalid("prompt", "chat completions take messages", remedy)
    for name in fields.keys() & {"messages", "tools"}:
        fields[name] = without_echoes(fields[name])
    _set_thinking(fields)
    request = _parse(fields, ChatCompletionRequest)
    if request.top_logprobs and not request.logprobs:
        remedy = "Set logprobs to true, or leave it out"
        raise Invalid("top_logprobs", "it needs logprobs", remedy)
    return request


def _set_thinking(fields: Document) -> None:
    """Writes other servers' switches of thinking into `chat_template_kwargs`. Raises Invalid where
    they differ. What has a wrong type stays, to be refused."""
    variables = fields.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        return
    variables = dict(variables)
    if isinstance(is_on := fields.get("enable_thinking"), bool):
        _set_variable(variables, "enable_thinking", is_on, "enable_thinking")
    switch = fields.get("thinking")
    kind = switch.get("type") if isinstance(switch, dict) else None
    if kind in ("enabled", "disabled"):
        for name in ("enable_thinking", "thinking"):
            _set_variable(variables, name, kind == "enabled", "thinking")
    if variables:
        fields["chat_template_kwargs"] = variables


def _set_variable(variables: Document, name: str, value: bool, field: str) -> None:
    if variables.setdefault(name, value) != value:
        problem = f"chat_template_kwargs or enable_thinking sets {name} otherwise"
        raise Invalid(field, problem, "Send one of the two")


def _parse(fields: Document, kind: type[RequestT]) -> RequestT:
    if isinstance(stop := fields.get("stop"), str):
        fields["stop"] = [stop] if stop else []
    if isinstance(options := fields.get("stream_options"), dict):
        fields["stream_options"] = _kept(options, STREAM_NEUTRAL, "stream_options.")
    tier = fields.get("service_tier")
    if isinstance(tier, str) and tier in PRIORITIES:
        fields.setdefault("priority", PRIORITIES[tier])
    request = parse_fields(fields, kind)
    if request.max_completion_tokens not in (None, request.length):
        remedy = "Send one of max_completion_tokens and max_tokens"
        raise Invalid("max_completion_tokens", "it differs from max_tokens", remedy)
    if request.length == 0:
        _check_echoes_alone(request)
    if request.stream_options != StreamOptions() and not request.stream:
        remedy = "Set stream to true, or leave it out"
        raise Invalid("stream_options", "it is only for streams", remedy)
    if request.response_format is not None and request.structured_outputs is not None:
        problem = "structured_outputs sets the form of the text"
        raise Invalid("response_format", problem, "Send one of the two")
    _check_scores_whole(request, "prompt_logprobs")
    with renaming(request.field_names):
        check_request(request)
    return request


def _check_echoes_alone(request: OpenAiRequest) -> None:
    """Raises Invalid for an answer without a token, unless it is the prompt."""
    if not isinstance(request, CompletionRequest) or not request.echo:
        raise Invalid("max_tokens", "it is 0; one token is the least", "Send more, or leave it out")
    if request.stream:
        raise Invalid("stream", "with max_tokens 0 there is nothing to stream", "Leave it out")


def _check_scores_whole(request: OpenAiRequest, field: str) -> None:
    """Raises Invalid for a stream with log-probabilities of the prompt, which are known with the
    result."""
    if request.stream and request.prompt_logprobs is not None:
        problem = "a stream has no log-probabilities of the prompt's tokens"
        raise Invalid(field, problem, "Leave out stream, or send it without them")


def _without_best_of(document: Document) -> Document:
    """Drops it where it is `n`: then no choice is left out."""
    best_of = document.get("best_of")
    if best_of != (document.get("n") or 1) or isinstance(best_of, bool):
        return document
    return {name: value for name, value in document.items() if name != "best_of"}


def _kept(document: Document, neutral: Mapping[str, tuple[Any, ...]], prefix: str = "") -> Document:
    """Returns the fields that have a value and an effect."""
    fields = {name: value for name, value in document.items() if value is not None}
    drop_neutral(fields, neutral, prefix)
    return fields
