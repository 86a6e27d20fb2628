"""Requests and their parameters as doors receive them: JSON-like objects, parsed and checked. Knows
no door."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

import msgspec

from shardline.base.errors import Invalid
from shardline.base.type_info import prepare
from shardline.contract.decision import check_question
from shardline.contract.ids import check_given_id
from shardline.contract.job import (
    DEFAULT_CRASHES,
    MAX_METADATA_BYTES,
    MAX_PROMPT_LOGPROBS,
    MAX_TOKENS,
    JobRequest,
    SamplingParams,
)
from shardline.contract.parents.parent_job import check_parents
from shardline.contract.plain_json import FIELDS, without_nulls
from shardline.contract.retry_policy import FIELD as RETRY
from shardline.contract.retry_policy import RETRIED_FAILURES, RetryPolicy, check_retry
from shardline.contract.structured_output import FIELD as STRUCTURED_OUTPUTS
from shardline.contract.structured_output import check_structured_output
from shardline.contract.tool_choice import callable_tools, check_tools


class RetryHolder(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a request with its retry policy."""

    retry: RetryPolicy


prepare(JobRequest, RetryHolder, SamplingParams)

MAX_METADATA_DEPTH = 32
MAX_SHOWN_CHARS = 64
"""Of a name that a caller made up, in an error."""

WITH_QUESTION = {
    "question",
    "chat_template_kwargs",
    "reasoning_effort",
    "seed",
    "exact",
    "adapter",
}
"""Parameters that a job with a question may have: the others choose a text's tokens."""

OF_CHATS = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "tools",
    "tool_choice",
    "reasoning_effort",
    "thinking_token_budget",
)
REPLACED = {"functions": "tools", "function_call": "tool_choice"}
"""OpenAI's first form of tools, and what has taken its place."""
REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "n": "Send one request for each completion, with different seeds; "
        "OpenAI's routes and submit_many of the Python client take n",
        "guided_json": "Send structured_outputs: {json: …}",
        "guided_regex": "Send structured_outputs: {regex: …}",
        "guided_choice": "Send structured_outputs: {choice: …}",
        "guided_grammar": "Send structured_outputs: {grammar: …}",
        "regex": "Send structured_outputs: {regex: …}",
        "ebnf": "Send structured_outputs: {grammar: …}",
    }
)
"""For fields of other doors and servers: vLLM's earlier names of what a text must be, SGLang's."""

KEY = " - at `key` in `"
"""Begins msgspec's path of a key."""

RequestT = TypeVar("RequestT", bound=msgspec.Struct)


def check_request(request: JobRequest) -> JobRequest:
    """Checks the rules that types cannot express. Raises Invalid."""
    check_given_id(request.id)
    if (request.prompt is None) == (request.messages is None):
        raise Invalid(
            "prompt", "exactly one of prompt and messages is needed", "Send one of the two"
        )
    if request.prompt is not None and len(request.prompt) == 0:
        raise Invalid(
            "prompt", "it is empty; at least one token is needed", "Send some text or token ids"
        )
    if request.messages is not None and not request.messages:
        raise Invalid("messages", "the list is empty", "Send at least one message")
    if request.messages is None and request.question is None:
        check_is_no_chat(request)
    if request.min_tokens and request.min_tokens > (
        longest := request.params().max_tokens or MAX_TOKENS
    ):
        raise Invalid(
            "min_tokens", f"it is above max_tokens ({longest})", "Lower it or raise max_tokens"
        )
    if request.flexible is not None and request.deadline_s is None:
        raise Invalid(
            "flexible",
            "without a deadline it could wait for ever",
            "Send deadline_s too, or leave it out",
        )
    _check_waits(request)
    _check_retries(request)
    check_params(request.params())
    check_metadata(request.metadata)
    return request


def _check_waits(request: JobRequest) -> None:
    if request.depends_on:
        check_parents(request.depends_on, request.prompt, request.messages)
    elif request.on_parent_failure != "fail":
        raise Invalid("on_parent_failure", "it waits for no job", "Send depends_on too")


def _check_retries(request: JobRequest) -> None:
    if request.retry is None:
        return
    check_retry(request.retry)
    if request.max_crashes != DEFAULT_CRASHES:
        raise Invalid("max_crashes", "retry covers crashes too", "Leave one of the two out")


def check_is_no_chat(params: SamplingParams) -> None:
    """Refuses, for a prompt, what only the rendering of messages reads. Raises Invalid."""
    default = SamplingParams()
    for name in OF_CHATS:
        if getattr(params, name) != getattr(default, name):
            raise Invalid(name, "a prompt is not rendered", "Send messages, or leave it out")


def check_continuation(params: SamplingParams) -> None:
    """Refuses a last message that is gone on with and ended. Raises Invalid."""
    if params.continue_final_message and params.add_generation_prompt:
        problem = "it goes on with the last message, add_generation_prompt begins a new one"
        raise Invalid("continue_final_message", problem, "Set add_generation_prompt to false too")


def check_params(params: SamplingParams) -> None:
    """Checks what the types of parameters cannot express. Raises Invalid."""
    if params.question is not None:
        check_question(params.question)
        _check_asks_alone(params)
    if params.truncate_prompt_tokens == 0:
        remedy = "Send how many of the last tokens to keep, or -1 for all that fit"
        raise Invalid("truncate_prompt_tokens", "it is 0: nothing would be left", remedy)
    check_continuation(params)
    check_tools(params.tools, params.tool_choice)
    called = callable_tools(params.tools, params.tool_choice, parallel=params.parallel_tool_calls)
    if called.is_required:
        for name in ("structured_outputs", "ignore_eos", "min_tokens"):
            if getattr(params, name):
                problem = "a required call leaves no content"
                raise Invalid(name, problem, "Leave it out, or send tool_choice auto")
    if params.structured_outputs is not None:
        check_structured_output(params.structured_outputs)
        _check_may_end(params, STRUCTURED_OUTPUTS, ("ignore_eos",))
    if params.thinking_token_budget is not None:
        _check_may_end(params, "thinking_token_budget", ("ignore_eos", "min_tokens"))


def check_prompt_logprobs(params: SamplingParams, num_prompt: int) -> None:
    """Raises Invalid for more log-probabilities of a prompt of `num_prompt` tokens than a row is to
    hold."""
    if params.prompt_logprobs is None:
        return
    num_each = 1 + params.prompt_logprobs
    if num_prompt * num_each > MAX_PROMPT_LOGPROBS:
        problem = (
            f"{num_prompt} prompt tokens with {params.prompt_logprobs} alternatives each are over "
            f"the limit of {MAX_PROMPT_LOGPROBS} log-probabilities"
        )
        remedy = f"Send at most {MAX_PROMPT_LOGPROBS // num_each} tokens, or ask for fewer"
        raise Invalid("prompt_logprobs", problem, remedy)


def _check_may_end(params: SamplingParams, holder: str, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(params, name):
            problem = f"with {holder} a completion ends where it can only end"
            raise Invalid(name, problem, "Leave one of the two out")


def _check_asks_alone(params: SamplingParams) -> None:
    """Raises Invalid for what has no effect on the probabilities of a question's answers."""
    usual = SamplingParams(max_tokens=1 if params.max_tokens == 1 else None)
    for name in params.__struct_fields__:
        if name not in WITH_QUESTION and getattr(params, name) != getattr(usual, name):
            problem = "a question is answered with probabilities, and no text is generated"
            raise Invalid(name, problem, "Leave it out, or the question")


def check_metadata(metadata: dict[str, Any] | None) -> None:
    """Raises Invalid for what is too much to be kept with every job; None stands for what was too
    much to be read."""
    if _is_deeper(metadata, MAX_METADATA_DEPTH):
        raise Invalid(
            "metadata",
            f"it is nested deeper than {MAX_METADATA_DEPTH} levels",
            "Store a flatter object",
        )
    try:
        num_bytes = (
            MAX_METADATA_BYTES + 1 if metadata is None else len(msgspec.json.encode(metadata))
        )
    except UnicodeEncodeError as error:
        raise Invalid(
            "metadata", "it holds a lone surrogate", "Change it: Postgres cannot store it"
        ) from error
    except (TypeError, ValueError, OverflowError) as error:
        raise Invalid(
            "metadata", f"it cannot be written as JSON: {error}", "Send what JSON knows"
        ) from error
    if num_bytes > MAX_METADATA_BYTES:
        problem = f"it has more than {MAX_METADATA_BYTES} bytes as JSON"
        raise Invalid("metadata", problem, "Store it elsewhere, and its place here")


def _is_deeper(document: object, limit: int) -> bool:
    """Without recursion: that is what deep nesting would exhaust."""
    level = [document]
    for _ in range(limit):
        containers = [
            one.values() if isinstance(one, dict) else one
            for one in level
            if isinstance(one, dict | list)
        ]
        level = [inner for container in containers for inner in container]
    return any(isinstance(one, dict | list) for one in level)


def parse_request(document: object) -> JobRequest:
    """A JSON-like object from any door as a checked request. Raises Invalid, naming the field."""
    return check_request(parse_fields(document, JobRequest))


def parse_fields(document: object, kind: type[RequestT]) -> RequestT:
    """A JSON-like object as the struct of its door. Raises Invalid for what the types do not
    allow."""
    for name, remedy in REPLACED.items():
        if isinstance(document, Mapping) and document.get(name) is not None:
            raise Invalid(name, "it is OpenAI's first form of tools", f"Send {remedy}")
    try:
        return msgspec.convert(_plain(document, kind), kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _naming_its_entry(error, document, kind) from error
    except UnicodeEncodeError as error:
        # msgspec looks into text where it wants none.
        field = _half_a_character(document, kind)
        raise Invalid(field, "it holds a lone surrogate", "Send whole characters") from error
    except RecursionError as error:
        raise Invalid("request", "it is nested too deeply", "Send a flatter object") from error


def _naming_its_entry(
    error: msgspec.ValidationError, document: object, kind: type[msgspec.Struct]
) -> Invalid:
    """Returns the error with the key of a wrong entry, where keys are the caller's own: msgspec
    leaves it out."""
    invalid = invalid_from(error)
    name = invalid.field.removesuffix("[...]")
    entries = document.get(name) if isinstance(document, Mapping) else None
    is_entry = name != invalid.field or KEY in str(error)
    if not isinstance(entries, Mapping) or not is_entry:
        return invalid
    wanted = get_type_hints(kind, include_extras=True)[name]
    for key, value in entries.items():
        try:
            msgspec.convert({key: value}, wanted, str_keys=True)
        except msgspec.ValidationError:
            return Invalid(name, f"at {shown(repr(key))} {invalid.problem}", invalid.remedy)
    return invalid


def _half_a_character(document: object, kind: type[msgspec.Struct]) -> str:
    """Returns the field with half a character in its value."""
    for name, value in document.items() if isinstance(document, Mapping) else ():
        try:
            msgspec.json.encode(name)
            msgspec.json.encode(value, enc_hook=str)
        except UnicodeEncodeError:
            return name if isinstance(name, str) and name in kind.__struct_fields__ else "request"
        except (TypeError, ValueError, RecursionError):
            continue
    return "request"


def parse_retry(document: object) -> RetryPolicy:
    """What a row holds as `retry`, which a hand may have written. Raises Invalid."""
    policy = parse_fields({RETRY: document}, RetryHolder).retry
    check_retry(policy)
    return policy


def parse_params(document: object) -> SamplingParams:
    """What a row holds as `params`, which a hand may have written. Raises
    msgspec.ValidationError."""
    return msgspec.convert(_plain(document, SamplingParams), SamplingParams, str_keys=True)


def _plain(document: object, kind: type[msgspec.Struct]) -> object:
    """Without nulls, which mean the same as leaving a field out, and with whole numbers as
    integers: some languages write 5 as 5.0. A field of fractions takes an integer too."""
    if not isinstance(document, Mapping):
        return document
    return {
        name: plain_value(name, value)
        for name, value in document.items()
        if value is not None or name not in kind.__struct_fields__
    }


def plain_value(name: object, value: object) -> object:
    """Returns the value of a request's field in its plain form: a whole number as an integer, its
    objects without nulls."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if name == RETRY:
        return _plain(value, RetryPolicy)
    return without_nulls(value) if name in FIELDS else value


def invalid_from(error: msgspec.ValidationError) -> Invalid:
    """msgspec's message, which names the limit and the path (`… - at `$.top_p``), as our error."""
    problem, _, path = str(error).partition(" - at `")
    field = path.removeprefix("key` in `").rstrip("`").removeprefix("$").removeprefix(".")
    remedy = "See docs/jobs.md or /openapi.json for fields and limits"
    if problem.startswith(("Object contains unknown field", "Object missing required field")):
        what, name, *_ = problem.split("`")
        problem = f"{what}`{shown(name)}`"
        remedy = REMEDIES.get(name, remedy)
        field = f"{field}.{name}" if field else name
    elif field.startswith(f"{RETRY}.on[") and problem.startswith("Invalid enum value"):
        problem = f"{problem.removeprefix('Invalid enum value ')} is never tried again"
        remedy = f"Send some of {', '.join(RETRIED_FAILURES)}"
    elif field == "traceparent" and "regex" in problem:
        problem = "it is not the traceparent of a W3C trace context"
    problem = problem[:1].lower() + problem[1:]
    return Invalid(shown(field) or "request", problem, remedy)


def shown(text: str) -> str:
    """The beginning of what a caller wrote, for an error or a log."""
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"
