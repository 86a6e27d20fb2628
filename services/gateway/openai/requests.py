"""OpenAI's request bodies in every form that its clients send, as the types that describe them.

Other spellings are rewritten, fields without effect dropped. Knows no server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from services.gateway.http.json_body import Document
from services.gateway.openai.bodies import ChatCompletionRequest, CompletionRequest, OpenAiRequest
from services.gateway.openai.neutral_fields import MESSAGE_NEUTRAL, STREAM_NEUTRAL, drop_neutral
from shardline.base.errors import Invalid
from shardline.contract.request_parsing import check_request, parse_fields

RequestT = TypeVar("RequestT", bound=OpenAiRequest)


def completion_request(document: Document) -> CompletionRequest:
    """Parse the body of `POST /v1/completions`. Raises Invalid.

    A list of one prompt is that prompt; several are several requests. `logprobs` of a chat's form
    means none."""
    fields = _kept(document, CompletionRequest.neutral)
    if "messages" in fields:
        remedy = "Send prompt, or use /v1/chat/completions"
        raise Invalid("messages", "completions take a prompt", remedy)
    if fields.get("logprobs") is False:
        del fields["logprobs"]
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            problem = f"it holds {len(prompt)} prompts; one is the limit"
            raise Invalid("prompt", problem, "Send one request for each prompt")
        fields["prompt"] = prompt[0]
    return _parse(fields, CompletionRequest)


def chat_request(document: Document) -> ChatCompletionRequest:
    """Parse the body of `POST /v1/chat/completions`. Raises Invalid."""
    fields = _kept(document, ChatCompletionRequest.neutral)
    if "prompt" in fields:
        remedy = "Send messages, or use /v1/completions"
        raise Invalid("prompt", "chat completions take messages", remedy)
    if isinstance(messages := fields.get("messages"), list):
        fields["messages"] = [_message(message, place) for place, message in enumerate(messages)]
    request = _parse(fields, ChatCompletionRequest)
    if request.top_logprobs and not request.logprobs:
        remedy = "Set logprobs to true, or leave it out"
        raise Invalid("top_logprobs", "it needs logprobs", remedy)
    return request


def _parse(fields: Document, kind: type[RequestT]) -> RequestT:
    if isinstance(stop := fields.get("stop"), str):
        fields["stop"] = [stop] if stop else []
    if isinstance(options := fields.get("stream_options"), dict):
        fields["stream_options"] = _kept(options, STREAM_NEUTRAL, "stream_options.")
    request = parse_fields(fields, kind)
    if request.max_completion_tokens not in (None, request.length):
        remedy = "Send one of max_completion_tokens and max_tokens"
        raise Invalid("max_completion_tokens", "it differs from max_tokens", remedy)
    if request.length == 0:
        raise Invalid("max_tokens", "it is 0; one token is the least", "Send more, or leave it out")
    if request.stream_options.include_usage and not request.stream:
        remedy = "Set stream to true, or leave it out"
        raise Invalid("stream_options", "it is only for streams", remedy)
    if request.response_format is not None and request.structured_outputs is not None:
        problem = "structured_outputs says what the text must be"
        raise Invalid("response_format", problem, "Send one of the two")
    check_request(request)
    return request


def _kept(document: Document, neutral: Mapping[str, tuple[Any, ...]], prefix: str = "") -> Document:
    """Returns the fields that have a value and an effect."""
    fields = {name: value for name, value in document.items() if value is not None}
    drop_neutral(fields, neutral, prefix)
    return fields


def _message(message: Any, place: int) -> Any:
    """Join content that comes in parts of text, by lines as vLLM does. `parse_fields` refuses what
    is no object."""
    if not isinstance(message, dict):
        return message
    fields = _kept(message, MESSAGE_NEUTRAL, f"messages[{place}].")
    parts = fields.get("content")
    if isinstance(parts, list):
        fields["content"] = "\n".join(
            _text_part(part, f"messages[{place}].content[{index}]")
            for index, part in enumerate(parts)
        )
    return fields


def _text_part(part: Any, field: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise Invalid(
        field,
        "only parts of type text are supported",
        'Send {"type": "text", "text": …} or a string',
    )
