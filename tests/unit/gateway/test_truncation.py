"""`truncation: auto`: what is left of a conversation is one that templates take."""

from __future__ import annotations

import pytest

from services.gateway.responses.conversation import beginnings
from services.gateway.responses.creation import fitting
from services.gateway.responses.requests import response_request
from shardline.contract.chat import FunctionCall, Message, ToolCall
from shardline_server.tokenize import Tokens
from tests.unit.tokenize.small_tokenizers import byte_level

ALTERNATING = (
    "{% for m in messages %}{% if m.role == 'user' or loop.first or m.role == 'tool' "
    "or loop.previtem.role in ('user', 'tool') %}{{ m.content }}{% else %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if loop.first and m.role not in ('system', 'user') %}"
    "{{ raise_exception('a user begins') }}{% endif %}{% endfor %}"
)
CALL = ToolCall(id="c1", function=FunctionCall(name="f", arguments="{}"))
TURNS = [
    Message(role="system", content="Be brief."),
    Message(role="user", content="one " * 10),
    Message(role="assistant", content="", tool_calls=(CALL,)),
    Message(role="tool", content="result " * 10, tool_call_id="c1"),
    Message(role="assistant", content="two " * 10),
    Message(role="user", content="three"),
    Message(role="assistant", content="four"),
    Message(role="user", content="five"),
]


def tokens(context_length: int) -> Tokens:
    tokenizer = byte_level()
    return Tokens(
        model="m",
        tokenizer_json=tokenizer.to_str(),
        chat_template=ALTERNATING,
        special_tokens={},
        context_length=context_length,
        vocab_size=tokenizer.get_vocab_size(),
        eos_ids=(),
    )


@pytest.mark.parametrize(
    ("context_length", "first"), [(4096, 1), (120, 5), (40, 5), (26, 5), (25, 7), (4, 7)]
)
def test_a_conversation_is_cut_before_a_message_of_the_user(
    context_length: int, first: int
) -> None:
    request = response_request(
        {"model": "m", "input": "-", "truncation": "auto", "max_output_tokens": 4}
    )
    found = fitting(tokens(context_length), request, TURNS)
    assert found == (TURNS[0], *TURNS[first:])


def test_a_conversation_without_instructions_begins_with_its_first_message() -> None:
    assert beginnings(TURNS[1:]) == [0, 4, 6]
    assert beginnings(TURNS[2:3]) == [0]
    assert beginnings([]) == [0]
