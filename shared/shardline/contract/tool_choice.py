"""Which of the tools of a request the model may call, and whether it must. Knows no grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shardline.base.errors import Invalid
from shardline.contract.chat import MAX_TOOL_NAME_CHARS, Tool

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 1 << 20
"""As JSON: all of it is in the prompt."""


class NamedFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function of the request's tools."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_TOOL_NAME_CHARS)]


class FunctionChoice(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="function",
):
    """The model must call this function, once."""

    function: NamedFunction


class AllowedTools(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[tuple[FunctionChoice, ...], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="allowed_tools",
):
    """The model may call only these of the request's tools."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | FunctionChoice | AllowedToolsChoice
Tools = Annotated[tuple[Tool, ...], Meta(max_length=MAX_TOOLS)]


class CallableTools(msgspec.Struct, frozen=True, kw_only=True):
    """What a choice leaves of the tools: those that the model may call."""

    tools: tuple[Tool, ...] = ()
    is_required: bool = False
    """The model must call one of them, and writes no content."""
    is_single: bool = False
    """It calls no more than one."""


def callable_tools(
    tools: Sequence[Tool], choice: ToolChoice | None, *, parallel: bool
) -> CallableTools:
    """Returns the tools that may be called. A choice that `check_tools` refuses leaves none."""
    if not tools or choice == "none":
        return CallableTools()
    if isinstance(choice, FunctionChoice):
        return CallableTools(tools=_named(tools, [choice]), is_required=True, is_single=True)
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        return CallableTools(
            tools=_named(tools, allowed.tools),
            is_required=allowed.mode == "required",
            is_single=not parallel,
        )
    return CallableTools(
        tools=tuple(tools), is_required=choice == "required", is_single=not parallel
    )


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Checks names and sizes. Raises Invalid."""
    names = [tool.function.name for tool in tools]
    for place, name in enumerate(names):
        if name in names[:place]:
            field = f"tools[{place}].function.name"
            raise Invalid(field, f"{name!r} is there twice", "Give each function its own name")
    _check_size(tools)
    if choice in (None, "none", "auto"):
        return
    if not tools:
        raise Invalid("tool_choice", "there are no tools", "Send tools, or leave it out")
    chosen: Sequence[FunctionChoice] = ()
    if isinstance(choice, FunctionChoice):
        chosen = [choice]
    elif isinstance(choice, AllowedToolsChoice):
        chosen = choice.allowed_tools.tools
    for one in chosen:
        if one.function.name not in names:
            problem = f"no tool is named {one.function.name!r}"
            raise Invalid("tool_choice", problem, "Name one of tools")


def _check_size(tools: Sequence[Tool]) -> None:
    try:
        num_bytes = len(msgspec.json.encode(tools)) if tools else 0
    except RecursionError:
        num_bytes = MAX_TOOLS_BYTES + 1
    except UnicodeEncodeError as error:
        raise Invalid("tools", "they hold a lone surrogate", "Send whole characters") from error
    if num_bytes > MAX_TOOLS_BYTES:
        problem = f"they have more than {MAX_TOOLS_BYTES} bytes as JSON"
        raise Invalid("tools", problem, "Send fewer, or shorter descriptions")


def _named(tools: Sequence[Tool], choices: Sequence[FunctionChoice]) -> tuple[Tool, ...]:
    names = {choice.function.name for choice in choices}
    return tuple(tool for tool in tools if tool.function.name in names)
