"""Names of tools have Anthropic's limit at every door."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.anthropic.requests import message_request
from services.gateway.openai.requests import chat_request
from services.gateway.responses.requests import response_request
from shardline.base.errors import Invalid

MESSAGES = [{"role": "user", "content": "a"}]


def by_chat(name: str) -> Any:
    tool = {"type": "function", "function": {"name": name}}
    return chat_request({"model": "m", "messages": MESSAGES, "tools": [tool], "tool_choice": tool})


def by_messages(name: str) -> Any:
    block = {"type": "tool_use", "id": "c-1", "name": name, "input": {}}
    turns = [*MESSAGES, {"role": "assistant", "content": [block]}, *MESSAGES]
    fields = {"model": "m", "max_tokens": 4, "messages": turns}
    tools = [{"name": name, "input_schema": {"type": "object"}}]
    return message_request(
        {**fields, "tools": tools, "tool_choice": {"type": "tool", "name": name}}
    )


def by_responses(name: str) -> Any:
    tool = {"type": "function", "name": name}
    return response_request({"model": "m", "input": "a", "tools": [tool], "tool_choice": tool})


@pytest.mark.parametrize("ask", [by_chat, by_messages, by_responses])
def test_a_tools_name_has_128_characters_at_most(ask: Any) -> None:
    request = ask("f" * 128)
    assert request.tools[0].function.name == request.tool_choice.function.name == "f" * 128
    with pytest.raises(Invalid) as caught:
        ask("f" * 129)
    assert caught.value.field.endswith("name")
