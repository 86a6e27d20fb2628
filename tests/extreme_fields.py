"""Requests whose fields stand at their limits and beyond, drawn from the limits: a new field is
drawn too."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec.inspect import (
    BoolType,
    FloatType,
    IntType,
    NoneType,
    StrType,
    StructType,
    Type,
    UnionType,
    VarTupleType,
)

from shardline.contract.job import SamplingParams

OTHERS: tuple[Any, ...] = (
    *(
        math.nan,
        math.inf,
        -math.inf,
        1e308,
        -1e308,
        10**400,
        -(10**400),
        2**31,
        2**32,
        2**63,
        2**64,
        -(2**63) - 1,
    ),
    *(True, False, "5", "", [], {}, [[]], "\0", "\ud800"),
)
"""What reaches arithmetic, encoders and Postgres's types badly, in any field."""


KINDS = (BoolType, IntType, FloatType, StrType, VarTupleType)
LISTED = ("stop", "stop_token_ids", "bad_words")
"""Lists whose items have limits of their own, of any model; messages are others' business."""
ELSEWHERE = (
    *("model", "prompt", "tenant"),
    *("add_generation_prompt", "continue_final_message", "thinking_token_budget"),
    "truncate_prompt_tokens",
    *("dimensions", "document", "prompt_name"),
)
"""Fields that any document has, that need messages, whose range has a hole, and of encoders."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A document, and which of its fields are beyond their limits."""

    document: dict[str, Any]
    beyond: frozenset[str] = field(default_factory=frozenset)


def fields_of(kind: type[SamplingParams]) -> dict[str, Type]:
    """Every field that is a flag, a number, a text or a list of them, with its limits and without
    null."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, StructType)
    found = {each.name: _inner(each.type) for each in info.fields if each.name not in ELSEWHERE}
    return {name: one for name, one in found.items() if isinstance(one, KINDS)}


def numbers_of(kind: type[SamplingParams]) -> dict[str, IntType | FloatType]:
    """Of these fields, the numbers."""
    return {
        name: one for name, one in fields_of(kind).items() if isinstance(one, IntType | FloatType)
    }


def _inner(kind: Type) -> Type:
    return (
        next(one for one in kind.types if not isinstance(one, NoneType))
        if isinstance(kind, UnionType)
        else kind
    )


def within(kind: Type) -> st.SearchStrategy[Any]:
    """Values that a field takes, those at its limits first."""
    if isinstance(kind, BoolType):
        return st.booleans()
    if isinstance(kind, IntType):
        low, high = least_and_most(kind)
        return st.sampled_from(limits(kind)) | st.integers(int(low), int(high))
    if isinstance(kind, FloatType):
        return st.sampled_from(limits(kind)) | st.floats(*least_and_most(kind))
    if isinstance(kind, StrType):
        if kind.pattern is not None:
            return st.from_regex(kind.pattern, fullmatch=True).filter(
                lambda text: len(text) <= (kind.max_length or 1)
            )
        lengths = st.sampled_from((kind.min_length or 0, kind.max_length or 9))
        return st.builds(lambda length, letter: letter * length, lengths, st.sampled_from("aé🐱"))
    assert isinstance(kind, VarTupleType), kind
    return st.lists(within(kind.item_type), max_size=kind.max_length) | st.lists(
        within(kind.item_type), min_size=kind.max_length or 1, max_size=kind.max_length or 1
    )


def least_and_most(kind: IntType | FloatType) -> tuple[float, float]:
    """Both are values of the field."""
    step, whole = (1, True) if isinstance(kind, IntType) else (math.inf, False)
    low = (
        kind.ge
        if kind.gt is None
        else kind.gt + step
        if whole
        else math.nextafter(kind.gt, math.inf)
    )
    high = (
        kind.le
        if kind.lt is None
        else kind.lt - step
        if whole
        else math.nextafter(kind.lt, -math.inf)
    )
    assert low is not None
    assert high is not None
    return low, high


def limits(kind: IntType | FloatType) -> list[float]:
    """Values at the limits of a number, and small ones between them."""
    low, high = least_and_most(kind)
    if isinstance(kind, IntType):
        return sorted({int(low), min(int(high), int(low) + 1), int(high)})
    ends = (low, high, math.nextafter(low, math.inf), math.nextafter(high, -math.inf))
    tiny = (value for value in (5e-324, 1e-40, -0.0, 0.0, -5e-324) if low <= value <= high)
    return list({str(value): value for value in (*ends, *tiny)}.values())


def past(kind: IntType | FloatType) -> list[float]:
    """Numbers just below and above the limits, and for a whole number a half."""
    low, high = least_and_most(kind)
    if not isinstance(kind, IntType):
        return [math.nextafter(low, -math.inf), math.nextafter(high, math.inf)]
    # A float that holds no half at the lower limit is whole.
    return [
        value for value in (int(low) - 1, int(high) + 1, int(low) + 0.5) if not takes(kind, value)
    ]


def beyond(kind: Type) -> st.SearchStrategy[Any]:
    """Values that a field must refuse."""
    values = [other for other in OTHERS if not takes(kind, other)]
    if isinstance(kind, IntType | FloatType):
        values += past(kind)
    if isinstance(kind, StrType):
        values += ["a" * ((kind.max_length or 0) + 1)]
    if isinstance(kind, VarTupleType) and kind.max_length is not None:
        item = 0 if isinstance(kind.item_type, IntType) else "a"
        values += [[item] * (kind.max_length + 1)]
    return st.sampled_from(values)


def takes(kind: Type, value: Any) -> bool:
    """The rule once more, said plainly."""
    if isinstance(kind, BoolType):
        return isinstance(value, bool)
    if isinstance(kind, IntType | FloatType):
        return _is_number(value, whole=isinstance(kind, IntType)) and _is_between(kind, value)
    if isinstance(kind, StrType):
        return (
            isinstance(value, str) and len(value) >= (kind.min_length or 0) and kind.pattern is None
        )
    assert isinstance(kind, VarTupleType), kind
    return isinstance(value, list) and all(takes(kind.item_type, one) for one in value)


def _is_number(value: Any, *, whole: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return not whole or isinstance(value, int) or value.is_integer()


def _is_small(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def _is_between(kind: IntType | FloatType, value: float) -> bool:
    return (
        (kind.gt is None or value > kind.gt)
        and (kind.ge is None or value >= kind.ge)
        and (kind.le is None or value <= kind.le)
    )


@st.composite
def drawn(draw: st.DrawFn, kind: type[SamplingParams] = SamplingParams) -> Drawn:
    """A request with any of the fields of `kind`, all within their limits or some beyond."""
    kinds = {
        name: one
        for name, one in fields_of(kind).items()
        if not isinstance(one, VarTupleType) or name in LISTED
    }
    names = draw(st.lists(st.sampled_from(sorted(kinds)), unique=True))
    wrong = frozenset(
        draw(st.lists(st.sampled_from(names), unique=True, max_size=2)) if names else ()
    )
    document = {
        name: draw(beyond(kinds[name]) if name in wrong else within(kinds[name])) for name in names
    }
    if draw(st.booleans()):
        # As languages with one kind of number write it, and where a float holds it.
        document = {name: float(one) if _is_small(one) else one for name, one in document.items()}
    most = document.get("max_tokens")
    least = document.get("min_tokens", 0)
    if not wrong and most is not None and least > most:
        del document["min_tokens"]
    return Drawn({"model": "m", "prompt": "text", **document}, wrong)
