"""What a chat template can render of tools, found by trying: templates declare nothing. Knows no
request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardline.base.errors import Invalid

Document = Mapping[str, Any]
Render = Callable[[Sequence[Document], Document], str | None]
"""Messages and variables as a text; None: it is too long. Raises Invalid."""

NAME = "probe_name"
KEY = "probe_key"
VALUE = "probe_value"
ANSWER = "probe_answer"
SYSTEM = "probe_system"
CALL_ID = "call00001"
"""Nine letters and digits: Mistral's templates take no others."""

USER: Document = {"role": "user", "content": "probe"}
PARAMETERS = {"type": "object", "properties": {KEY: {"type": "string", "description": VALUE}}}
TOOLS: Sequence[Document] = (
    {
        "type": "function",
        "function": {"name": NAME, "description": VALUE, "parameters": PARAMETERS},
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateAbilities:
    """What a template renders by itself, and how it takes it."""

    has_system: bool
    has_tools: bool
    has_calls: bool
    """Calls of the assistant and their answers."""
    takes_objects: bool = True
    """Arguments of calls as objects; else as their JSON text."""
    takes_no_content: bool = False
    """The content of a message with calls is None; else an empty text."""


def abilities_of(render: Render) -> TemplateAbilities:
    """Tries a template with small conversations."""
    system = {"role": "system", "content": SYSTEM}
    has_system = SYSTEM in _text(render, [system, USER])
    has_tools = NAME in _text(render, [USER], tools=TOOLS)
    for content in ("", None):
        for arguments in ({KEY: VALUE}, f'{{"{KEY}": "{VALUE}"}}'):
            text = _text(render, _calling(content, arguments), tools=TOOLS)
            called = text.replace(_text(render, [USER], tools=TOOLS), "")
            if NAME in called and ANSWER in called and _is_json(called):
                return TemplateAbilities(
                    has_system=has_system,
                    has_tools=has_tools,
                    has_calls=True,
                    takes_objects=isinstance(arguments, dict),
                    takes_no_content=content is None,
                )
    return TemplateAbilities(has_system=has_system, has_tools=has_tools, has_calls=False)


def _calling(content: str | None, arguments: Any) -> Sequence[Document]:
    function = {"name": NAME, "arguments": arguments}
    call = {"id": CALL_ID, "type": "function", "function": function}
    return [
        USER,
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": ANSWER, "tool_call_id": CALL_ID, "name": NAME},
    ]


def _is_json(text: str) -> bool:
    """Whether the arguments are there, and neither as Python writes objects nor as a text in
    JSON."""
    return KEY in text and VALUE in text and f"{{'{KEY}'" not in text and f'{{\\"{KEY}' not in text


def _text(render: Render, messages: Sequence[Document], **variables: Any) -> str:
    try:
        return render(messages, variables) or ""
    except Invalid:
        return ""
