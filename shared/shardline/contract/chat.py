"""A conversation: its messages, the tools that the model may call, and the model's reply. Tools and
calls have OpenAI's form, in requests, rows and results alike. Knows no chat template."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call that the model has made; the answer to it names its id."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One chat message."""

    role: str
    content: str
    name: str | None = None


class FunctionDefinition(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A function as the model is told of it; `parameters` is a JSON schema."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]+$", max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the model may call."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What a completion of a chat says: its text without the model's own markers, what the model
    thought before, and its calls."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The next part of call number `index`: the first one has its id and name, each some of its
    arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class ReplyDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The next part of a reply."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
