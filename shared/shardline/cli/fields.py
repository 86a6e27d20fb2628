"""Turns what is typed into the fields of a request. Knows no field by name: the request itself
checks them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from shardline.base.errors import Invalid


def read_prompt(argument: str | None) -> str:
    """The argument, or standard input without its last line break."""
    if argument is not None and argument != "-":
        return argument
    if sys.stdin.isatty():
        raise Invalid("prompt", "there is none", "Give it as an argument or on standard input")
    return sys.stdin.read().removesuffix("\n")


def parse_fields(assignments: Iterable[str], option: str = "--field") -> dict[str, Any]:
    """`top_p=0.9` → {"top_p": 0.9}. What is no JSON is a string."""
    fields: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not (name and equals):
            raise Invalid(
                option, f"{assignment!r} is no name=value", f"Write for example {option} top_p=0.9"
            )
        fields[name] = _value(value)
    return fields


def prompt_fields(prompt: str, *, chat: bool, system: str | None) -> dict[str, Any]:
    """The prompt as it is, or as the user's message of a chat."""
    if not chat and system is None:
        return {"prompt": prompt}
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return {"messages": messages}


def held_to(schema: Path | None) -> dict[str, Any]:
    """The field that holds a completion to the schema in a file. Raises Invalid."""
    if schema is None:
        return {}
    try:
        return {"structured_outputs": {"json": schema.read_text(encoding="utf-8")}}
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid("--schema", f"{schema}: {error}", "Give a file with a JSON schema") from error


def callable_tools(files: Iterable[Path]) -> dict[str, Any]:
    """The field with the tools of these files: each has one in OpenAI's form, or a list of them.
    Raises Invalid."""
    tools: list[Any] = []
    for file in files:
        try:
            document = msgspec.json.decode(file.read_bytes())
        except (OSError, msgspec.DecodeError, RecursionError) as error:
            remedy = "Give a file with a tool in OpenAI's form"
            raise Invalid("--tool", f"{file}: {error}", remedy) from error
        tools += document if isinstance(document, list) else [document]
    return {"tools": tools} if tools else {}


def parents(after: Iterable[str]) -> dict[str, Any]:
    """The field with the jobs that end before: each `ID` or `ID=NAME`."""
    found = []
    for one in after:
        job, _, name = one.partition("=")
        found.append({"job": job, "as": name} if name else {"job": job})
    return {"depends_on": found} if found else {}


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
