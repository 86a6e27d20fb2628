"""Blocks of Anthropic's messages come in the order in which the model wrote them, whole or in a
stream."""

from __future__ import annotations

from typing import Any, get_args
from uuid import uuid4

import msgspec
import pytest

from services.gateway.anthropic.messages import MessageEvents, MessageParts
from services.gateway.anthropic.requests import message_request
from services.gateway.anthropic.server_blocks import AnyServerBlock
from shardline.contract.job import FinishReason, Result, Usage
from shardline.contract.wire import Delta
from shardline_server.tokenize import Tokens
from tests.unit.tokenize.small_tokenizers import byte_level

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
TEXT = f"<think>Hm.</think>One moment.{CALL} And then{CALL} done."
KINDS = ["thinking", "text", "tool_use", "text", "tool_use", "text"]
TEMPLATE = "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
DOCUMENT: dict[str, Any] = {
    "model": "m",
    "max_tokens": 500,
    "messages": [{"role": "user", "content": "Rome?"}],
    "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}


@pytest.fixture
def parts() -> MessageParts:
    tokenizer = byte_level()
    tokens = Tokens(
        model="m",
        tokenizer_json=tokenizer.to_str(),
        chat_template=TEMPLATE,
        special_tokens={},
        context_length=4096,
        vocab_size=tokenizer.get_vocab_size(),
        eos_ids=(),
    )
    return MessageParts(
        job_id=uuid4(),
        model="m",
        request=message_request(DOCUMENT),
        tokens=tokens,
        prompt_ids=(),
        max_tokens=500,
    )


def whole(parts: MessageParts) -> list[Any]:
    answer = parts.whole(
        Result(
            job_id=parts.job_id,
            text=TEXT,
            token_ids=(),
            usage=Usage(prompt_tokens=1, completion_tokens=1),
            finish_reason=FinishReason.STOP,
            exact=True,
        )
    )
    blocks: list[Any] = msgspec.to_builtins(answer.content)
    return blocks


def test_a_whole_message_has_its_blocks_as_they_were_written(parts: MessageParts) -> None:
    blocks = whole(parts)
    assert [block["type"] for block in blocks] == KINDS
    assert [block["text"] for block in blocks if block["type"] == "text"] == [
        "One moment.",
        " And then",
        " done.",
    ]
    assert blocks[2]["input"] == {"city": "Rome"}


@pytest.mark.parametrize("size", [1, 7, 40, len(TEXT)])
def test_a_stream_has_the_blocks_of_the_whole_message(parts: MessageParts, size: int) -> None:
    events = MessageEvents(parts)
    found: list[Any] = []
    for start in range(0, len(TEXT), size):
        state = "succeeded" if start + size >= len(TEXT) else None
        piece = Delta(fence=1, start=0, text=TEXT[start : start + size], state=state)
        found += events.push(piece)
    texts: list[str] = []
    kinds: list[str] = []
    for event in msgspec.to_builtins(found):
        if event["type"] == "content_block_start":
            kinds.append(event["content_block"]["type"])
            texts.append("")
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            texts[-1] += delta.get("text") or delta.get("thinking") or delta.get("partial_json")
    assert kinds == KINDS
    said = [block.get("text") or block.get("thinking") for block in whole(parts)]
    assert [text for text, kind in zip(texts, kinds, strict=True) if kind != "tool_use"] == [
        text for text in said if text is not None
    ]


@pytest.mark.parametrize(
    "kind", [block.__struct_config__.tag for block in get_args(AnyServerBlock)]
)
def test_what_a_server_tool_did_is_left_out_of_a_conversation(kind: str) -> None:
    images = [{"type": "image", "source": {"type": "file", "file_id": "f"}}]
    done = {"type": kind, "id": "srvtoolu_1", "name": "web_search", "content": images}
    said = {"type": "text", "text": "It rains."}
    turn = {"role": "assistant", "content": [done, said, done]}
    asked = {**DOCUMENT, "messages": [*DOCUMENT["messages"], turn, *DOCUMENT["messages"]]}
    assert [(one.role, one.content) for one in message_request(asked).messages] == [
        ("user", "Rome?"),
        ("assistant", "It rains."),
        ("user", "Rome?"),
    ]
