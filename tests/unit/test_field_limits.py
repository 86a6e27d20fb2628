"""The limits of a request's fields: docs/jobs.md says those that the code has."""

from __future__ import annotations

import re

import msgspec
import pytest
from msgspec.inspect import (
    Field,
    FloatType,
    IntType,
    ListType,
    StrType,
    StructType,
    Type,
    UnionType,
    VarTupleType,
)

from shardline.contract.job import MAX_METADATA_BYTES, JobRequest
from shardline.contract.request_parsing import MAX_METADATA_DEPTH
from tests.repository import REPOSITORY

WORDS = {2**63 - 1: "2⁶³ \N{MINUS SIGN} 1", -(2**63): "-2⁶³"}


def fields() -> dict[str, Type]:
    """Every field of a request with its limits."""
    info = msgspec.inspect.type_info(JobRequest)
    assert isinstance(info, StructType)
    return {field.name: _inner(field) for field in info.fields}


def _inner(field: Field) -> Type:
    """Without null."""
    if not isinstance(field.type, UnionType):
        return field.type
    return next(one for one in field.type.types if not isinstance(one, msgspec.inspect.NoneType))


def documented() -> dict[str, str]:
    """Of each field, its row in the tables."""
    rows: dict[str, str] = {}
    for line in (REPOSITORY / "docs/jobs.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            names = line.split("|")[1]
            limit = line.split("|")[3]
            rows |= dict.fromkeys(re.findall(r"`(\w+)`", names), limit.strip())
    return rows


def _said(number: float) -> str:
    return WORDS.get(int(number)) or (
        f"{number:,}" if float(number) != int(number) else f"{int(number):,}"
    )


def _limit(kind: Type) -> str | None:
    """As the document writes it; None: there is nothing to say."""
    if isinstance(kind, IntType | FloatType):
        if kind.gt is not None:
            return f"over {_said(kind.gt)}, at most {_said(kind.le or 0)}"
        assert kind.ge is not None, "a number without a floor"
        assert kind.le is not None, "a number without a ceiling"
        return f"{_said(kind.ge)} to {_said(kind.le)}"
    if isinstance(kind, StrType) and kind.max_length is not None:
        return (
            f"{kind.min_length} to {kind.max_length} characters"
            if kind.min_length
            else f"{kind.max_length} char"
        )
    if isinstance(kind, ListType | VarTupleType) and kind.max_length is not None:
        return f"up to {kind.max_length} "
    return None


@pytest.mark.parametrize("name", fields())
def test_the_document_says_the_limits_of_each_field(name: str) -> None:
    limit = _limit(fields()[name])
    if name == "adapter":
        limit = None  # a name of `GET /v1/models`
    assert name in documented()
    assert limit is None or limit in documented()[name], limit


def test_the_document_says_the_limits_of_metadata() -> None:
    assert f"at most {MAX_METADATA_BYTES:,} bytes" in documented()["metadata"]
    assert f"up to {MAX_METADATA_DEPTH} levels" in documented()["metadata"]
