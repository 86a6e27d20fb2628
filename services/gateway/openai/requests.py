"""OpenAI's request bodies as ours: renamed, or refused by name where a field would change the
answer.

What is left over goes to `parse_request`, which knows every field of ours and refuses the rest.
Knows no server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from services.gateway.http.json_body import Document
from services.gateway.openai.neutral_fields import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    MESSAGE_NEUTRAL,
    STREAM_NEUTRAL,
    drop_neutral,
    is_one_of,
    short,
)
from shardline.base.errors import Invalid
from shardline.contract.job import INTERACTIVE_PRIORITY, JobRequest
from shardline.contract.request_parsing import parse_request, shown

DEFAULT_COMPLETION_TOKENS = 16
"""Of a request to /v1/completions without a number: as OpenAI and vLLM have it."""

NO_LIMIT = -1
"""Of `max_tokens`, as other servers write it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """How the caller wants the answer; not part of the job."""

    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    default_max_tokens: int | None = None
    """At most this many tokens, or all that fit; None: those that the request asks for, or all that
    fit."""


def completion_request(document: Document) -> tuple[JobRequest, AnswerOptions]:
    """Parse the body of `POST /v1/completions`. Raises Invalid."""
    return _request(document, COMPLETION_NEUTRAL, _completion_fields)


def chat_request(document: Document) -> tuple[JobRequest, AnswerOptions]:
    """Parse the body of `POST /v1/chat/completions`. Raises Invalid."""
    return _request(document, CHAT_NEUTRAL, _chat_fields)


def _request(
    document: Document, neutral: Mapping[str, tuple[Any, ...]], rename: Callable[[Document], None]
) -> tuple[JobRequest, AnswerOptions]:
    fields = {name: value for name, value in document.items() if value is not None}
    drop_neutral(fields, neutral)
    options = _answer_options(fields)
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]] if fields["stop"] else []
    _one_of_two(fields, "max_completion_tokens", "max_tokens")
    rename(fields)
    fields.setdefault("priority", INTERACTIVE_PRIORITY)
    if "max_tokens" not in fields and neutral is COMPLETION_NEUTRAL:
        options = replace(options, default_max_tokens=DEFAULT_COMPLETION_TOKENS)
    if is_one_of(fields.get("max_tokens"), (NO_LIMIT,)):
        del fields["max_tokens"]
    return parse_request(fields), options


def _answer_options(fields: Document) -> AnswerOptions:
    stream = _flag(fields, "stream")
    stream_options = fields.pop("stream_options", None)
    if stream_options is None:
        return AnswerOptions(stream=stream, return_token_ids=_flag(fields, "return_token_ids"))
    if not isinstance(stream_options, dict):
        raise Invalid("stream_options", "it is not an object", 'Send {"include_usage": true}')
    stream_options = {name: value for name, value in stream_options.items() if value is not None}
    include_usage = _flag(stream_options, "include_usage", prefix="stream_options.")
    drop_neutral(stream_options, STREAM_NEUTRAL, "stream_options.")
    for name in stream_options:
        raise Invalid(
            f"stream_options.{shown(name)}",
            "there is no such option",
            "Send include_usage or nothing",
        )
    if include_usage and not stream:
        raise Invalid(
            "stream_options", "it is only for streams", "Set stream to true, or leave it out"
        )
    return AnswerOptions(
        stream=stream,
        include_usage=include_usage,
        return_token_ids=_flag(fields, "return_token_ids"),
    )


def _flag(fields: Document, name: str, prefix: str = "") -> bool:
    value = fields.pop(name, False)
    if not isinstance(value, bool):
        raise Invalid(prefix + name, f"{short(value)} is not a boolean", "Send true or false")
    return value


def _completion_fields(fields: Document) -> None:
    """A list of one prompt is that prompt; several are several requests. `logprobs` of a chat's
    form means none."""
    if fields.get("logprobs") is False:
        del fields["logprobs"]
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise Invalid(
                "prompt",
                f"it holds {len(prompt)} prompts; one is the limit",
                "Send one request for each prompt",
            )
        fields["prompt"] = prompt[0]
    if "messages" in fields:
        raise Invalid(
            "messages", "completions take a prompt", "Send prompt, or use /v1/chat/completions"
        )


def _chat_fields(fields: Document) -> None:
    if "prompt" in fields:
        raise Invalid(
            "prompt", "chat completions take messages", "Send messages, or use /v1/completions"
        )
    if "messages" not in fields:
        raise Invalid("messages", "it is missing", "Send a list of messages")
    logprobs = _flag(fields, "logprobs")
    num_top = fields.pop("top_logprobs", None)
    if num_top not in (None, 0) and not logprobs:
        raise Invalid("top_logprobs", "it needs logprobs", "Set logprobs to true, or leave it out")
    if logprobs:
        fields["logprobs"] = 0 if num_top is None else num_top
    if isinstance(fields["messages"], list):
        fields["messages"] = [
            _message(message, place) for place, message in enumerate(fields["messages"])
        ]


def _message(message: Any, place: int) -> Any:
    """Join content that comes in parts of text, by lines as vLLM does. `parse_request` refuses what
    is no object."""
    if not isinstance(message, dict):
        return message
    fields = {name: value for name, value in message.items() if value is not None}
    drop_neutral(fields, MESSAGE_NEUTRAL, f"messages[{place}].")
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


def _one_of_two(fields: Document, alias: str, name: str) -> None:
    if alias not in fields:
        return
    value = fields.pop(alias)
    if fields.setdefault(name, value) != value:
        raise Invalid(alias, f"it differs from {name}", f"Send one of {alias} and {name}")
