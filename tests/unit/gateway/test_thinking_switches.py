"""Other servers' switches of thinking: variables of the chat template, unless they differ."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.openai.requests import chat_request
from shardline.base.errors import Invalid

CHAT: dict[str, Any] = {"model": "clerk", "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled"}}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"a": 1, "enable_thinking": True}},
            {"a": 1, "enable_thinking": True},
        ),
        ({"enable_thinking": None, "thinking": None}, {}),
    ],
)
def test_a_switch_of_thinking_sets_variables_of_the_template(
    fields: dict[str, Any], variables: dict[str, Any]
) -> None:
    assert chat_request({**CHAT, **fields}).chat_template_kwargs == variables


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "thinking"),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "enable_thinking",
        ),
        (
            {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": False}},
            "thinking",
        ),
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"thinking": {"type": "auto"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        (
            {"enable_thinking": True, "chat_template_kwargs": {f"v{n}": n for n in range(16)}},
            "chat_template_kwargs",
        ),
    ],
)
def test_a_wrong_switch_of_thinking_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(Invalid) as caught:
        chat_request({**CHAT, **fields})
    assert caught.value.field == field
