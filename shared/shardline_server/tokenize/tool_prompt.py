"""Tools and calls as text, for chat templates that know none: the tools in the system message,
calls and their answers in Hermes' form. Knows no template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardline.contract.chat import ASSISTANT, TOOL

Document = Mapping[str, Any]

SYSTEM_ROLES = ("system", "developer")

ABOUT_TOOLS = """You can call functions. They are, as JSON, one on each line:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON between these tags, and nothing else:
<tool_call>
{{"name": "its name", "arguments": {{"its arguments": "by name"}}}}
</tool_call>"""


def with_tools(
    messages: Sequence[Document], tools: Sequence[Document], *, has_system: bool
) -> list[Document]:
    """Returns the messages with the tools described in the first system message: in a new one if
    there is none, in the first message if the template has no system messages."""
    about = ABOUT_TOOLS.format(tools="\n".join(_line(tool["function"]) for tool in tools))
    first = messages[0]
    if first["role"] in SYSTEM_ROLES or not has_system:
        text = f"{first['content']}\n\n{about}" if first["content"] else about
        return [{**first, "content": text}, *messages[1:]]
    return [{"role": "system", "content": about}, *messages]


def with_calls_as_text(messages: Sequence[Document]) -> list[Document]:
    """Returns the messages with calls as content, and their answers as messages of the user: those
    that follow one another as one, because many templates take turns strictly."""
    found: list[Document] = []
    for place, message in enumerate(messages):
        if message["role"] == TOOL:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if place and messages[place - 1]["role"] == TOOL:
                text = f"{found.pop()['content']}\n{text}"
            found.append({"role": "user", "content": text})
        elif message["role"] == ASSISTANT and message.get("tool_calls"):
            calls = [_call(call["function"]) for call in message["tool_calls"]]
            texts = [message["content"], *calls] if message["content"] else calls
            kept = {name: value for name, value in message.items() if name != "tool_calls"}
            found.append({**kept, "content": "\n".join(texts)})
        else:
            found.append(message)
    return found


def _call(function: Document) -> str:
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _line(function: Document) -> str:
    return json.dumps(function, ensure_ascii=False)
