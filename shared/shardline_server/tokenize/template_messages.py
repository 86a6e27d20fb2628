"""Messages, tools and variables of a request as chat templates know them. Renders nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import msgspec

from shardline.contract.chat import Message, Tool
from shardline.contract.job import SamplingParams

Document = Mapping[str, Any]

REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Of what an assistant's message thought: each family of templates has its own."""

NO_THINKING = ("none", "minimal")
"""Efforts that leave thinking out, where a template knows nothing between on and off."""

NO_PARAMETERS: Document = {"type": "object", "properties": {}}


def template_message(message: Message) -> Document:
    """Returns the message with the content as text."""
    found = {**msgspec.to_builtins(message), "content": message.text}
    if message.reasoning is not None:
        found |= dict.fromkeys(REASONING_NAMES, message.reasoning)
    return found


def template_tools(tools: Sequence[Tool]) -> list[Document]:
    """Returns the tools for the template, without `strict`, which the model need not know."""
    found: list[Document] = []
    for tool in tools:
        function = {"parameters": NO_PARAMETERS, **msgspec.to_builtins(tool.function)}
        function.pop("strict", None)
        ordered = {name: function[name] for name in sorted(function, key=_place)}
        found.append({"type": "function", "function": ordered})
    return found


def template_variables(params: SamplingParams, thinking: Set[str]) -> Document:
    """Returns the variables of the request; `thinking` names those that switch thinking. What the
    request sets itself goes first."""
    effort = params.reasoning_effort
    if effort is None:
        return params.chat_template_kwargs
    switches = dict.fromkeys(thinking, effort not in NO_THINKING)
    return {"reasoning_effort": effort, **switches, **params.chat_template_kwargs}


def _place(name: str) -> int:
    return ("name", "description", "parameters").index(name)
