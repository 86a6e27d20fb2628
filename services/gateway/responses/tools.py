"""Tools and their choice in the flat form of OpenAI's responses, and as jobs have them. The API's
description is made from these types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shardline.contract.chat import FunctionDefinition, Tool
from shardline.contract.tool_choice import (
    MAX_TOOLS,
    AllowedTools,
    AllowedToolsChoice,
    FunctionChoice,
    NamedFunction,
    ToolChoice,
)

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]+$", max_length=64)]


class ResponseTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A function that the model may call. Tools that run on a server are refused."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        """Returns it as a job has it."""
        return Tool(
            function=FunctionDefinition(
                name=self.name,
                description=self.description,
                parameters=self.parameters,
                strict=self.strict,
            )
        )


class ChosenFunction(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """The model must call this function, once."""

    name: Name


class AllowedFunctions(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"
):
    """As if the request had these tools alone."""

    mode: Literal["auto", "required"]
    tools: Annotated[tuple[ChosenFunction, ...], Meta(min_length=1, max_length=MAX_TOOLS)]


ResponseTools = Annotated[tuple[ResponseTool, ...], Meta(max_length=MAX_TOOLS)]
ResponseToolChoice = Literal["none", "auto", "required"] | ChosenFunction | AllowedFunctions


def choice_of(choice: ResponseToolChoice) -> ToolChoice:
    """Returns the choice as a job has it."""
    if isinstance(choice, ChosenFunction):
        return FunctionChoice(function=NamedFunction(name=choice.name))
    if isinstance(choice, AllowedFunctions):
        tools = tuple(
            FunctionChoice(function=NamedFunction(name=tool.name)) for tool in choice.tools
        )
        return AllowedToolsChoice(allowed_tools=AllowedTools(mode=choice.mode, tools=tools))
    return choice


def flat_tool(tool: Tool) -> ResponseTool:
    """Returns a job's tool as an answer repeats it."""
    function = tool.function
    return ResponseTool(
        name=function.name,
        description=function.description,
        parameters=None if function.parameters is None else function.schema,
        strict=function.strict,
    )


def flat_choice(choice: ToolChoice | None) -> ResponseToolChoice:
    """Returns a job's choice as an answer repeats it."""
    if isinstance(choice, FunctionChoice):
        return ChosenFunction(name=choice.function.name)
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        tools = tuple(ChosenFunction(name=one.function.name) for one in allowed.tools)
        return AllowedFunctions(mode=allowed.mode, tools=tools)
    return choice or "auto"
