"""Bodies of `/v1/responses` become requests for jobs. Knows no server and no row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from services.gateway.field_names import renaming
from services.gateway.http.json_body import Document
from services.gateway.openai.service_tier import PRIORITIES
from services.gateway.responses.conversation import messages_of
from services.gateway.responses.hosted_calls import HostedCall
from services.gateway.responses.hosted_tools import refuse_chosen
from services.gateway.responses.input_items import InputItem, InputMessage, SentItem
from services.gateway.responses.request_fields import ResponseFields
from services.gateway.responses.tools import choice_of, functions_of, places_of
from shardline.base.errors import Invalid
from shardline.contract.job import JobRequest
from shardline.contract.plain_json import without_nulls
from shardline.contract.request_parsing import (
    check_request,
    invalid_from,
    parse_fields,
    plain_value,
)
from shardline.contract.tool_choice import callable_tools

ELSEWHERE: Mapping[str, str] = {
    "prompt": "Send input, or use /v1/completions",
    "messages": "Send input, or use /v1/chat/completions",
    "conversation": "Send previous_response_id",
    "context_management": "Send truncation: auto",
    "max_tokens": "Send max_output_tokens",
    "max_completion_tokens": "Send max_output_tokens",
    "logprobs": "Send top_logprobs, and message.output_text.logprobs in include",
    "prompt_logprobs": "Use /v1/chat/completions",
    "response_format": "Send text: {format: …}",
    "reasoning_effort": "Send reasoning: {effort: …}",
    "n": "Send one request for each response",
    "depends_on": "Use /v1/jobs",
}
"""Fields of other doors or of OpenAI's servers, and what to send in their place."""


FIELD_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of a job, and what they are called here."""


class ResponseRequest(JobRequest, frozen=True, kw_only=True):
    """A job of this door. Its messages are its input alone until the gateway reads the earlier
    conversation."""

    asked: ResponseFields


NULLABLE = ("text", "reasoning")
"""Fields of this door alone with objects that clients send back with nulls."""


def response_request(document: Document) -> ResponseRequest:
    """Parse the body of `POST /v1/responses`. Raises Invalid."""
    fields = {name: value for name, value in document.items() if value is not None}
    if fields.get("context_management") == []:
        del fields["context_management"]
    for name, remedy in ELSEWHERE.items():
        if name in fields:
            raise Invalid(name, "it is not supported here", remedy)
    own = {name: fields.pop(name) for name in [*fields] if name in ResponseFields.__struct_fields__}
    asked = _asked(own)
    fields.setdefault("priority", PRIORITIES[asked.service_tier])
    job = parse_fields({**fields, **_renamed(asked)}, JobRequest)
    if job.structured_outputs is not None and asked.text.structured() is not None:
        problem = "structured_outputs sets the form of the text"
        raise Invalid("text.format", problem, "Send one of the two")
    messages = messages_of(kept_items_of(asked), instructions=asked.instructions)
    values = {name: getattr(job, name) for name in JobRequest.__struct_fields__}
    values |= {
        "messages": messages,
        "structured_outputs": asked.text.structured() or job.structured_outputs,
        "tools": functions_of(asked.tools),
        "tool_choice": None if asked.tool_choice == "auto" else choice_of(asked.tool_choice),
        "parallel_tool_calls": asked.parallel_tool_calls,
        "reasoning_effort": asked.reasoning.effort,
    }
    called = callable_tools(
        values["tools"], values["tool_choice"], parallel=asked.parallel_tool_calls
    )
    if called.is_required:
        # A required call leaves no content.
        values["structured_outputs"] = job.structured_outputs
    request = ResponseRequest(**values, asked=asked)
    with renaming(field_names(asked)):
        check_request(request)
    if asked.background and not asked.store:
        remedy = "Leave store out, or run it in the foreground"
        raise Invalid("background", "what is not stored cannot be asked for later", remedy)
    return request


def field_names(asked: ResponseFields) -> Mapping[str, str]:
    """Returns the names that this request has for fields of its job."""
    names = {**FIELD_NAMES, **places_of(asked.tools)}
    if asked.text.structured() is not None:
        names["structured_outputs.json"] = "text.format.schema"
        names["structured_outputs"] = "text.format"
    return names


def items_of(asked: ResponseFields) -> tuple[SentItem, ...]:
    """The input as items: a text is a message of the user."""
    if isinstance(asked.input, str):
        return (InputMessage(role="user", content=asked.input),)
    return asked.input


def kept_items_of(asked: ResponseFields) -> tuple[InputItem, ...]:
    """Those that the response's row keeps. Raises Invalid if there is none."""
    kept = tuple(item for item in items_of(asked) if not isinstance(item, HostedCall))
    if not kept:
        raise Invalid("input", "it holds calls of OpenAI's own tools alone", "Send messages too")
    return kept


def _asked(fields: Document) -> ResponseFields:
    fields = {
        name: without_nulls(value) if name in NULLABLE else plain_value(name, value)
        for name, value in fields.items()
    }
    if isinstance(items := fields.get("input"), list):
        fields["input"] = [_typed(item) for item in items]
    refuse_chosen(fields.get("tool_choice"))
    try:
        return msgspec.convert({"input": None, **fields}, ResponseFields)
    except msgspec.ValidationError as error:
        raise invalid_from(error) from error
    except UnicodeEncodeError as error:
        raise Invalid("request", "it holds a lone surrogate", "Send whole characters") from error


def _typed(item: Any) -> Any:
    """A message may come without its type, and so may a reference, which is an id alone."""
    if not isinstance(item, dict) or item.get("type") is not None:
        return item
    if "role" in item:
        return {**item, "type": "message"}
    return {**item, "type": "item_reference"} if item.keys() - {"type"} == {"id"} else item


def _renamed(asked: ResponseFields) -> Document:
    """The fields of a job that have other names here."""
    found: Document = {}
    if asked.max_output_tokens is not None:
        found["max_tokens"] = asked.max_output_tokens
    if asked.has_logprobs:
        found["logprobs"] = asked.top_logprobs
    return found
