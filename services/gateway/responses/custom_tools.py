"""Custom tools: those that take any text. A job has each as a function with one argument, which is
that text. The API's description is made from these types."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shardline.base.errors import Invalid
from shardline.contract.chat import MAX_TOOL_NAME_CHARS, FunctionDefinition, Tool
from shardline_server.replies.json_text import text_of, value_of

INPUT = "input"
"""The name of the argument."""
MAX_REGEX_CHARS = 4_096

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]+$", max_length=MAX_TOOL_NAME_CHARS)]


class AnyInput(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Any text."""


class GrammarInput(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="grammar"):
    """A text that a regular expression matches as a whole."""

    syntax: Literal["regex", "lark"]
    definition: Annotated[str, Meta(min_length=1, max_length=MAX_REGEX_CHARS)]


InputFormat = AnyInput | GrammarInput


class CustomTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom"):
    """A tool that takes any text."""

    name: Name
    description: str | None = None
    format: InputFormat = AnyInput()

    def tool(self, place: str) -> Tool:
        """Returns it as a job has it. Raises Invalid for a grammar in lark's syntax."""
        argument: dict[str, Any] = {"type": "string"}
        if isinstance(self.format, GrammarInput):
            if self.format.syntax == "lark":
                problem = "grammars of lark are not supported"
                remedy = "Send a regex, or describe the text in description"
                raise Invalid(f"{place}.format.syntax", problem, remedy)
            argument["pattern"] = f"^(?:{self.format.definition})$"
        return Tool(
            function=FunctionDefinition(
                name=self.name,
                description=self.description,
                parameters={
                    "type": "object",
                    "properties": {INPUT: argument},
                    "required": [INPUT],
                    "additionalProperties": False,
                },
                strict=isinstance(self.format, GrammarInput) or None,
            )
        )


def arguments_of(text: str) -> str:
    """Returns a call's input as the arguments of its function."""
    return text_of({INPUT: text})


BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
MAX_BEGIN_PIECES = 64
"""In which a text begins that is read while it is written; others are read at their end."""
CHARACTERS = re.compile(
    r"""(?: [^"\\]+
        | \\["\\/bfnrt]
        | \\u (?![dD][89abAB]) [0-9a-fA-F]{4}
        | \\u [dD][89abAB][0-9a-fA-F]{2}
          (?: \\u[dD][c-fC-F][0-9a-fA-F]{2} | (?=[^\\] | \\[^u] | \\u[^dD] | \\u[dD][^c-fC-F]) )
        )*""",
    re.VERBOSE,
)
"""Of a JSON string, as far as no escape, and no pair of them, is cut."""


class InputReader:
    """Reads the text of a call from its function's arguments, while these are being written."""

    def __init__(self) -> None:
        self._unread: list[str] = []
        self._has_begun = False

    def push(self, more: str) -> str:
        """Returns the text that the next piece of the arguments settles."""
        self._unread.append(more)
        if not self._has_begun and len(self._unread) > MAX_BEGIN_PIECES:
            return ""
        found = "".join(self._unread)
        if not self._has_begun:
            begin = BEGIN.match(found)
            if begin is None:
                return ""
            self._has_begun = True
            found = found[begin.end() :]
        elif found.startswith('"'):
            self._unread = ['"']
            return ""
        settled = CHARACTERS.match(found)
        assert settled is not None, "it matches nothing, too"
        self._unread = [found[settled.end() :]]
        return _whole(json.loads(f'"{settled[0]}"', strict=False))

    def end(self) -> str:
        """Returns what is left: where a model has written other arguments, all of them."""
        if self._has_begun:
            return ""
        written = "".join(self._unread)
        try:
            arguments = value_of(written)
        except ValueError:
            return written
        text = arguments.get(INPUT) if isinstance(arguments, dict) else None
        return _whole(text) if isinstance(text, str) else written


def _whole(text: str) -> str:
    """The text with lone surrogates replaced, which no UTF-8 holds."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
