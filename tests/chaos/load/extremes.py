"""Requests with numbers at their limits, and just beyond them. The limits are those of the types.
Knows no door."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from shardline.contract.job import JobRequest, SamplingParams
from tests.chaos.load.requests import Request
from tests.extreme_fields import OTHERS, limits, numbers_of, past, takes

SAMPLED: Final = MappingProxyType(numbers_of(SamplingParams))
NUMBERS: Final = MappingProxyType(numbers_of(JobRequest))
LENGTHS = frozenset({"max_tokens", "min_tokens"})
"""Besides their own limit there is the model's."""

NUM_COMBINED = 6
HOUR_S = 3600.0
MANY_CRASHES = 10
EXPIRED = frozenset({"expired"})
FAILED = frozenset({"failed"})
SUCCEEDED = frozenset({"succeeded"})


def alone(request: Request, room: int) -> Iterator[Request]:
    """The same with each number of its sampling at each of its limits. `room`: the tokens that its
    prompt leaves."""
    for name, kind in SAMPLED.items():
        for limit in limits(kind):
            yield _consistent({**request, name: limit}, room)


def combined(request: Request, room: int) -> Iterator[Request]:
    """The same with all of them at some limit at once; the same ones every time."""
    rng = random.Random(NUM_COMBINED)
    for _ in range(NUM_COMBINED):
        yield _consistent(
            {**request, **{name: rng.choice(limits(kind)) for name, kind in SAMPLED.items()}}, room
        )


def _consistent(fields: dict[str, Any], room: int) -> Request:
    """Within the model's limit, and ending no earlier than it may."""
    lengths = {name: min(fields[name], room) for name in LENGTHS & fields.keys()}
    return {**fields, **lengths, "max_tokens": max(lengths.values())}


def job_limits() -> list[tuple[Request, frozenset[str]]]:
    """Each other number of a job at each of its limits, with the states in which it may end."""
    others = {name: kind for name, kind in NUMBERS.items() if name not in SAMPLED}
    return [_with_ends(name, limit) for name, kind in others.items() for limit in limits(kind)]


def _with_ends(name: str, limit: float) -> tuple[Request, frozenset[str]]:
    if name == "delay_s" and limit > HOUR_S:
        # Nobody waits for its beginning: its deadline comes first.
        return {name: limit, "deadline_s": min(limits(NUMBERS["deadline_s"]))}, EXPIRED
    if name == "deadline_s" and limit < HOUR_S:
        return {name: limit}, EXPIRED | SUCCEEDED
    if name == "max_crashes" and limit < MANY_CRASHES:
        return {name: limit}, FAILED | SUCCEEDED
    return {name: limit}, SUCCEEDED


def beyond() -> list[Mapping[str, Any]]:
    """Each number just beyond its limits: one field, which every door must refuse."""
    return [{name: value} for name, kind in NUMBERS.items() for value in past(kind)]


def no_number() -> list[Mapping[str, Any]]:
    """Each number as something that arithmetic, encoders and databases take badly, as far as JSON
    can say it."""
    values = [value for value in OTHERS if _is_json(value)]
    return [
        {name: value}
        for name, kind in NUMBERS.items()
        for value in values
        if not takes(kind, value)
    ]


def _is_json(value: Any) -> bool:
    try:
        return bool(json.dumps(value, allow_nan=False, ensure_ascii=False).encode())
    except ValueError:
        return False
