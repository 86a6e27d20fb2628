"""A conversation: its messages, the tools that the model may call, and the model's reply. Tools and
calls have OpenAI's form, in requests, rows and results alike. Knows no chat template."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

ASSISTANT = "assistant"
TOOL = "tool"

MAX_TOOL_CALLS = 128
"""Of one message."""

MAX_TOOL_NAME_CHARS = 128
"""Anthropic's limit; OpenAI's is 64."""


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """A function's name, and its arguments as JSON text. Clients add other fields, which
    change nothing."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the model has made; the answer to it names its id. Clients that have put it
    together from a stream send its index too."""

    id: Annotated[str, Meta(max_length=256)]
    type: Literal["function"] = "function"
    function: FunctionCall


class TextPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message's content. A refusal of the model counts as text too."""

    type: str
    text: str | None = None
    refusal: str | None = None

    def __post_init__(self) -> None:
        """Refuse images, sound and files, by the name of their type."""
        if self.type == "refusal" and self.refusal is not None:
            force_setattr(self, "type", "text")
            force_setattr(self, "text", self.refusal)
        if self.type != "text" or self.text is None:
            shown = self.type[:64]
            problem = f"it is of type {shown!r} without text" if self.type == "text" else shown
            raise ValueError(f"only parts of type text are supported, not {problem}")


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One chat message.

    Parts of text are joined by lines, as vLLM joins them, and `reasoning_content` is `reasoning`:
    a message has one form once it is made. What clients send back of an answer's message without
    its meaning anything is dropped. Raises ValueError.
    """

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | tuple[TextPart, ...] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    tool_calls: Annotated[tuple[ToolCall, ...], Meta(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    """Of a tool's answer: the call that it answers."""
    reasoning: str | None = None
    """The model's reasoning before the content."""
    reasoning_content: str | None = None
    refusal: str | None = None
    """The model's refusal; it becomes the content."""
    annotations: tuple[dict[str, Any], ...] | None = None
    audio: None = None
    function_call: None = None

    def __post_init__(self) -> None:
        """Give the message its one form."""
        if isinstance(self.content, tuple | list):
            text = "\n".join(part.text or "" for part in self.content)
            force_setattr(self, "content", text)
        if self.refusal and not self.content:
            force_setattr(self, "content", self.refusal)
        if self.content is None and self.role != ASSISTANT:
            raise ValueError("content is missing: send a text")
        if self.tool_calls and self.role != ASSISTANT:
            raise ValueError("tool_calls belong to messages of role assistant")
        force_setattr(self, "reasoning", self.reasoning or self.reasoning_content or None)
        force_setattr(self, "tool_calls", self.tool_calls or None)
        for name in ("reasoning_content", "refusal", "annotations"):
            force_setattr(self, name, None)

    @property
    def text(self) -> str:
        """The content; empty for calls alone."""
        return self.content if isinstance(self.content, str) else ""


class FunctionDefinition(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A function as the prompt describes it; `parameters` is a JSON schema or its text, in which
    Postgres keeps the order of properties. Raises ValueError."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]+$", max_length=MAX_TOOL_NAME_CHARS)]
    description: str | None = None
    parameters: dict[str, Any] | str | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if isinstance(self.parameters, str):
            try:
                schema = msgspec.json.decode(self.parameters, type=dict[str, Any])
            except (msgspec.MsgspecError, RecursionError) as error:
                raise ValueError(f"parameters are no JSON object: {error}") from error
            msgspec.structs.force_setattr(self, "parameters", schema)

    @property
    def schema(self) -> dict[str, Any]:
        """The parameters as an object."""
        return self.parameters if isinstance(self.parameters, dict) else {}


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the model may call."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The parsed completion of a chat: its text without the model's own markers, its reasoning, and
    its calls."""

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
