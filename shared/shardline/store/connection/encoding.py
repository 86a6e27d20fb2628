"""Values that cross into Postgres as JSON, and rows as contracts. Owns what Postgres's JSON and
text cannot hold."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import ARRAY, Column, ColumnElement, RowMapping, Uuid, any_, literal

from shardline.base.errors import Invalid
from shardline.base.type_info import prepare
from shardline.contract.chat import ToolCall
from shardline.contract.decision import Decision
from shardline.contract.job import (
    FinishReason,
    Job,
    JobState,
    PromptLogprob,
    Result,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from shardline.contract.plain_json import encode_json
from shardline.contract.request_parsing import parse_params, parse_retry, shown
from shardline.contract.retry_policy import RetryPolicy

prepare(Decision, PromptLogprob, TokenLogprob, ToolCall)

Key = tuple[UUID, int]
"""A job and the fence of one claim of it."""

MAX_DEPTH = 100
"""Of nested values in metadata and the like."""

NO_PROBABILITY = -9999.0
"""Stands for minus infinity, which JSON has not."""


def dump(rows: object) -> str:
    """Rows for `jsonb_to_recordset`: one parameter, whatever their number and however ragged their
    arrays."""
    return encode_json(rows).decode()


def dump_keys(keys: Iterable[Key]) -> str:
    """Claims for `jsonb_to_recordset(…) AS keys(job_id uuid, fence bigint)`."""
    return dump([{"job_id": job_id, "fence": fence} for job_id, fence in keys])


def is_any(column: Column[Any], ids: Collection[UUID]) -> ColumnElement[bool]:
    """`column` is one of `ids`, as one parameter: any number of them."""
    return column == any_(literal(list(ids), ARRAY(Uuid())))


def storable(text: str) -> str:
    """Generated text with the two things replaced that Postgres refuses: NUL and lone
    surrogates."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def dump_logprobs(logprobs: Iterable[TokenLogprob]) -> list[Any]:
    """Returns nested arrays `[token_id, logprob, [[token_id, logprob], …]]`."""
    return [
        [
            entry.token_id,
            _finite(entry.logprob),
            [[token_id, _finite(value)] for token_id, value in entry.top],
        ]
        for entry in logprobs
    ]


def load_logprobs(document: object) -> tuple[TokenLogprob, ...] | None:
    """The reverse of `dump_logprobs`; None stays None."""
    return (
        None
        if document is None
        else msgspec.convert(document, tuple[TokenLogprob, ...], strict=False)
    )


def _dump_prompt_logprobs(logprobs: Iterable[PromptLogprob | None]) -> list[Any]:
    """Returns null or `[token_id, logprob, rank, [[token_id, logprob], …]]` for each token."""
    return [
        None
        if entry is None
        else [
            entry.token_id,
            _finite(entry.logprob),
            entry.rank,
            [[token_id, _finite(value)] for token_id, value in entry.top],
        ]
        for entry in logprobs
    ]


def _load_prompt_logprobs(document: object) -> tuple[PromptLogprob | None, ...] | None:
    kind = tuple[PromptLogprob | None, ...]
    return None if document is None else msgspec.convert(document, kind, strict=False)


def load_params(document: object) -> SamplingParams:
    """Reads those of a prepared row, which were checked then. Raises msgspec.ValidationError for
    those of a later release."""
    return parse_params(document)


def dump_result(result: Result) -> dict[str, Any]:
    """The columns of `results`, without job and fence."""
    return {
        "text": storable(result.text),
        "token_ids": result.token_ids,
        "prompt_tokens": result.usage.prompt_tokens,
        "completion_tokens": result.usage.completion_tokens,
        "cached_tokens": result.usage.cached_tokens,
        "finish_reason": result.finish_reason,
        "logprobs": None if result.logprobs is None else dump_logprobs(result.logprobs),
        "reasoning": None if result.reasoning is None else storable(result.reasoning),
        "reasoning_tokens": result.usage.reasoning_tokens,
        "tool_calls": [_storable_call(call) for call in result.tool_calls] or None,
        "prompt_logprobs": None
        if result.prompt_logprobs is None
        else _dump_prompt_logprobs(result.prompt_logprobs),
        "exact": result.exact,
        "timings": result.timings,
        "provenance": result.provenance,
        "embedding": result.embedding,
        "score": result.score,
        **({} if result.decision is None else msgspec.structs.asdict(result.decision)),
    }


def load_result(row: RowMapping, prefix: str = "") -> Result:
    """Reads a row of `results`; its columns may carry a prefix."""
    return Result(
        job_id=row[f"{prefix}job_id"],
        text=row[f"{prefix}text"],
        token_ids=tuple(row[f"{prefix}token_ids"]),
        usage=Usage(
            prompt_tokens=row[f"{prefix}prompt_tokens"],
            completion_tokens=row[f"{prefix}completion_tokens"],
            cached_tokens=row[f"{prefix}cached_tokens"],
            reasoning_tokens=row[f"{prefix}reasoning_tokens"],
        ),
        finish_reason=FinishReason(row[f"{prefix}finish_reason"]),
        exact=row[f"{prefix}exact"],
        logprobs=load_logprobs(row[f"{prefix}logprobs"]),
        reasoning=row[f"{prefix}reasoning"],
        tool_calls=msgspec.convert(row[f"{prefix}tool_calls"] or (), tuple[ToolCall, ...]),
        prompt_logprobs=_load_prompt_logprobs(row[f"{prefix}prompt_logprobs"]),
        timings=row[f"{prefix}timings"],
        provenance=row[f"{prefix}provenance"],
        decision=_load_decision(row, prefix),
        embedding=None if row[f"{prefix}embedding"] is None else tuple(row[f"{prefix}embedding"]),
        score=row[f"{prefix}score"] if row[f"{prefix}choice"] is None else None,
    )


def _storable_call(call: ToolCall) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(call)
    function = document["function"]
    function["arguments"] = storable(function["arguments"])
    return document


def _load_decision(row: RowMapping, prefix: str) -> Decision | None:
    if row[f"{prefix}choice"] is None:
        return None
    columns = {name: row[prefix + name] for name in Decision.__struct_fields__}
    return msgspec.convert(columns, Decision)


def load_job(row: RowMapping) -> Job:
    """A row of `jobs` with the columns of its result under the prefix `result_`, null without
    one."""
    return Job(
        id=row["id"],
        tenant=row["tenant_id"],
        model=row["model"],
        state=JobState(row["state"]),
        priority=row["priority"],
        created_at=row["created_at"],
        prompt=row["prompt"],
        prompt_token_ids=None if row["prompt_ids"] is None else tuple(row["prompt_ids"]),
        params=readable_params(row["params"]),
        seed=row["seed"],
        metadata=row["metadata"],
        finished_at=row["finished_at"],
        cancel_requested=row["cancel_requested_at"] is not None,
        crashes=row["crashes"],
        fence=row["fence"],
        retry=readable_retry(row["retry"]),
        next_attempt_at=row["not_before"] if row["state"] == JobState.QUEUED else None,
        replay_of=row["replay_of"],
        depends_on=None if row["depends_on"] is None else tuple(row["depends_on"]),
        on_parent_failure=row["on_parent_failure"],
        waits_for=tuple(row["waits_for"] or ()),
        error=row["error"],
        result=None if row["result_job_id"] is None else load_result(row, "result_"),
    )


def unstorable(value: object) -> str | None:
    """What in here Postgres's text and JSON cannot hold, or None: NUL, a lone surrogate, NaN or
    Infinity, or nesting deeper than MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH):
        if not level:
            return None
        for one in level:
            if (problem := unstorable_alone(one)) is not None:
                return problem
        level = [inner for one in level for inner in _inside(one)]
    return f"it is nested more than {MAX_DEPTH} deep"


def unstorable_alone(one: object) -> str | None:
    """The same of a text or a number, without what is inside of others."""
    if isinstance(one, str) and _is_refused(one):
        return "it holds a NUL character or a lone surrogate"
    if isinstance(one, float) and not math.isfinite(one):
        return f"it holds the number {one}, which JSON has not"
    return None


def place_of_unstorable(value: object) -> str:
    """Returns where `unstorable` has found it: `.stop[0]` of parameters, for an error; empty for
    the value itself."""
    level = [("", value)]
    for _ in range(MAX_DEPTH):
        for place, one in level:
            if unstorable_alone(one) is not None:
                return place
        level = [pair for place, one in level for pair in _places_inside(place, one)]
    return ""


def _places_inside(place: str, value: object) -> Iterable[tuple[str, object]]:
    if isinstance(value, Mapping):
        keys = [(place, key) for key in value]
        return [*keys, *((f"{place}.{shown(str(key))}", inner) for key, inner in value.items())]
    if isinstance(value, list | tuple):
        return [(f"{place}[{number}]", inner) for number, inner in enumerate(value)]
    return ()


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list | tuple) else ()


def _is_refused(text: str) -> bool:
    return "\0" in text or not (text.isascii() or _encodes(text))


def _encodes(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def readable_params(document: object) -> SamplingParams:
    """A row written by hand, or by a later release, may hold parameters that fail it; it must stay
    readable."""
    known = document.items() if isinstance(document, Mapping) else ()
    try:
        return load_params(
            {name: value for name, value in known if name in SamplingParams.__struct_fields__}
        )
    except msgspec.ValidationError:
        return SamplingParams()


def readable_retry(document: object) -> RetryPolicy | None:
    """Returns a row's policy; None for a row without one, or if SQL has made it invalid since its
    check."""
    try:
        return None if document is None else parse_retry(document)
    except Invalid:
        return None


def _finite(value: float) -> float:
    return value if math.isfinite(value) else NO_PROBABILITY
