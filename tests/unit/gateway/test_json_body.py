"""What a body becomes in memory is known before it is decoded."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from services.gateway.http.json_body import (
    MAX_FIELD_BYTES,
    check_fields,
    decoded_bytes,
    read_object,
)
from shardline.base.errors import Invalid
from shardline.contract.tool_choice import MAX_TOOLS_BYTES

PIECES = {
    "objects": b"{}",
    "objects with a field": b'{"a":1}',
    "objects with fields of their own": b'{"%d":{"%d":[%d]}}',
    "lists": b"[]",
    "lists in lists": b"[[[[[[[[0]]]]]]]]",
    "numbers": b"70000",
    "fractions": b"1.5",
    "short texts": b'"abc"',
    "messages": b'{"role":"user","content":"a"}',
    "parts": b'{"role":"user","content":[{"type":"text","text":"a"}]}',
    "text": b'"%s"' % (b"plain text, and more: " * 40),
    "text with an emoji": ('"' + "plain text" * 100 + '\N{GRINNING FACE}"').encode(),
    "text in Chinese": ('"' + "\u4e2d\u6587" * 100 + '"').encode(),
}


@pytest.mark.parametrize("num_bytes", [20_000, 1_000_000])
@pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES)
def test_a_decoded_body_takes_no_more_than_was_counted(piece: bytes, num_bytes: int) -> None:
    num_pieces = num_bytes // (len(piece) + 1)
    pieces = [piece % ((number,) * piece.count(b"%d")) for number in range(num_pieces)]
    body = b'{"messages":[' + b",".join(pieces) + b"]}"
    read_object(body)
    tracemalloc.start()
    try:
        document = read_object(body)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert document
    assert taken <= decoded_bytes(body) + 4096


@pytest.mark.parametrize("field", ["metadata", "stop", "question", "logit_bias", "unknown"])
def test_a_large_field_is_refused_by_name_before_it_is_decoded(field: str) -> None:
    body = json.dumps(
        {"model": "a", "prompt": "b" * MAX_FIELD_BYTES, field: [{}] * (MAX_FIELD_BYTES // 4 + 1)}
    ).encode()
    with pytest.raises(Invalid) as refused:
        check_fields(body)
    assert (refused.value.field, str(MAX_FIELD_BYTES) in refused.value.problem) == (field, True)
    check_fields(
        json.dumps(
            {"prompt": "b" * (4 * MAX_FIELD_BYTES), "messages": [{}] * MAX_FIELD_BYTES}
        ).encode()
    )


@pytest.mark.parametrize(
    "field", ["document", "documents", "query", "text_1", "text_2", "questions"]
)
def test_a_field_whose_route_takes_more_is_left_to_the_bodys_limit(field: str) -> None:
    check_fields(json.dumps({"model": "a", field: ["b" * MAX_FIELD_BYTES] * 20}).encode())


def test_tools_have_a_limit_of_their_own() -> None:
    tool = {"name": "a", "description": "b" * MAX_FIELD_BYTES}
    check_fields(json.dumps({"tools": [tool] * 15}).encode())
    with pytest.raises(Invalid, match=f"tools: it is over {MAX_TOOLS_BYTES} bytes"):
        check_fields(json.dumps({"tools": [tool] * 16}).encode())


def test_text_takes_its_own_bytes_whatever_signs_it_has() -> None:
    text = '{"a": [1, 2], "b": {}}' * 10_000
    body = json.dumps({"prompt": text}).encode()
    assert decoded_bytes(body) <= 2 * len(body)
