"""Tools and their choice in the flat form of OpenAI's responses, and as jobs have them: there a
function of a namespace has one name of both. The API's description is made from these types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from services.gateway.responses.custom_tools import CustomTool, InputFormat, Name
from services.gateway.responses.hosted_tools import AnyHosted, HostedTool
from shardline.base.errors import Invalid
from shardline.contract.chat import MAX_TOOL_NAME_CHARS, FunctionDefinition, Tool
from shardline.contract.tool_choice import (
    MAX_TOOLS,
    AllowedTools,
    AllowedToolsChoice,
    FunctionChoice,
    NamedFunction,
    ToolChoice,
)

JOINT = "__"
"""Between a namespace and a name, as the model reads and writes them."""


class ResponseTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self, _place: str) -> Tool:
        """Returns it as a job has it."""
        return Tool(
            function=FunctionDefinition(
                name=self.name,
                description=self.description,
                parameters=self.parameters,
                strict=self.strict,
            )
        )


class NamespaceTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="namespace"):
    """A group of functions under one name. The prompt lists each function separately."""

    name: Name
    description: str | None = None
    tools: Annotated[tuple[ResponseTool, ...], Meta(min_length=1, max_length=MAX_TOOLS)]


class ChosenFunction(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """The model must call this function, once."""

    name: Name


class ChosenCustomTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom"):
    """The model must call this custom tool, once."""

    name: Name


class AllowedFunctions(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"
):
    """The model may call only these of the request's tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[tuple[ChosenTool, ...], Meta(min_length=1, max_length=MAX_TOOLS)]


ChosenTool = ChosenFunction | ChosenCustomTool
AnyTool = ResponseTool | NamespaceTool | CustomTool
AskedTool = AnyTool | AnyHosted
ResponseTools = Annotated[tuple[AskedTool, ...], Meta(max_length=MAX_TOOLS)]
ResponseToolChoice = Literal["none", "auto", "required"] | ChosenTool | AllowedFunctions


def choice_of(choice: ResponseToolChoice) -> ToolChoice:
    """Returns the choice as a job has it."""
    if isinstance(choice, ChosenTool):
        return FunctionChoice(function=NamedFunction(name=choice.name))
    if isinstance(choice, AllowedFunctions):
        tools = tuple(
            FunctionChoice(function=NamedFunction(name=tool.name)) for tool in choice.tools
        )
        return AllowedToolsChoice(allowed_tools=AllowedTools(mode=choice.mode, tools=tools))
    return choice


def joined_name(namespace: str | None, name: str) -> str:
    """Returns a function's name as a job has it."""
    return name if namespace is None else f"{namespace}{JOINT}{name}"


def functions_of(tools: Iterable[AskedTool]) -> tuple[Tool, ...]:
    """Returns all functions as a job has them. Raises Invalid for too many, or a name too long."""
    found: list[Tool] = []
    for place, namespace, tool in _functions(tools):
        name = joined_name(namespace, tool.name)
        if len(name) > MAX_TOOL_NAME_CHARS:
            problem = (
                f"with its namespace it has {len(name)} characters, {MAX_TOOL_NAME_CHARS} at most"
            )
            raise Invalid(f"{place}.name", problem, "Shorten one of the two")
        found.append(replace(tool, name=name).tool(place))
    if len(found) > MAX_TOOLS:
        problem = f"they are {len(found)} functions, {MAX_TOOLS} at most"
        raise Invalid("tools", problem, "Send fewer")
    return tuple(found)


def places_of(tools: Iterable[AskedTool]) -> dict[str, str]:
    """Returns where a request has each function, by its place in a job, and each namespace's
    description, by its place in `descriptions_of`."""
    tools = tuple(tools)
    found: dict[str, str] = {}
    for number, (where, _, one) in enumerate(_functions(tools)):
        function = f"tools[{number}].function"
        if isinstance(one, CustomTool):
            found[f"{function}.parameters"] = f"{where}.format.definition"
        found[function] = where
    for place, tool in enumerate(tools):
        if isinstance(tool, NamespaceTool):
            found[f"descriptions.{tool.name}"] = f"tools[{place}].description"
    return found


def namespaces_of(tools: Iterable[AskedTool]) -> dict[str, str]:
    """Returns the namespaces of functions that have one, by the functions' names in a job."""
    return {
        joined_name(namespace, tool.name): namespace
        for _, namespace, tool in _functions(tools)
        if namespace is not None
    }


def descriptions_of(tools: Iterable[AskedTool]) -> dict[str, str]:
    """Returns the descriptions of namespaces that have one, by the namespaces' names."""
    return {
        tool.name: tool.description
        for tool in tools
        if isinstance(tool, NamespaceTool) and tool.description is not None
    }


def custom_formats_of(tools: Iterable[AskedTool]) -> dict[str, InputFormat]:
    """Returns the formats of custom tools by their names."""
    return {tool.name: tool.format for tool in tools if isinstance(tool, CustomTool)}


def flat_tools(
    tools: Iterable[Tool],
    namespaces: Mapping[str, str],
    descriptions: Mapping[str, str],
    custom_formats: Mapping[str, InputFormat],
) -> list[AnyTool]:
    """Returns a job's tools as an answer repeats them. OpenAI's clients require a namespace's
    description, so one without has an empty one."""
    found: list[AnyTool] = []
    for tool in tools:
        if tool.function.name in custom_formats:
            found.append(_flat_custom_tool(tool, custom_formats[tool.function.name]))
            continue
        flat = _flat_tool(tool)
        namespace = namespaces.get(flat.name)
        if namespace is None:
            found.append(flat)
            continue
        flat = replace(flat, name=flat.name.removeprefix(namespace + JOINT))
        before = found[-1] if found else None
        if isinstance(before, NamespaceTool) and before.name == namespace:
            found[-1] = replace(before, tools=(*before.tools, flat))
        else:
            description = descriptions.get(namespace, "")
            found.append(NamespaceTool(name=namespace, description=description, tools=(flat,)))
    return found


def _functions(
    tools: Iterable[AskedTool],
) -> Iterator[tuple[str, str | None, ResponseTool | CustomTool]]:
    """Each function or custom tool with its place and its namespace."""
    for place, tool in enumerate(tools):
        if isinstance(tool, ResponseTool | CustomTool):
            yield f"tools[{place}]", None, tool
            continue
        if isinstance(tool, HostedTool):
            continue
        for inner, one in enumerate(tool.tools):
            yield f"tools[{place}].tools[{inner}]", tool.name, one


def _flat_tool(tool: Tool) -> ResponseTool:
    function = tool.function
    return ResponseTool(
        name=function.name,
        description=function.description,
        parameters=None if function.parameters is None else function.schema,
        strict=function.strict,
    )


def _flat_custom_tool(tool: Tool, input_format: InputFormat) -> CustomTool:
    function = tool.function
    return CustomTool(name=function.name, description=function.description, format=input_format)


def flat_choice(
    choice: ToolChoice | None, custom_formats: Mapping[str, InputFormat]
) -> ResponseToolChoice:
    """Returns a job's choice as an answer repeats it."""

    def chosen(function: NamedFunction) -> ChosenTool:
        is_custom = function.name in custom_formats
        return (ChosenCustomTool if is_custom else ChosenFunction)(name=function.name)

    if isinstance(choice, FunctionChoice):
        return chosen(choice.function)
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        tools = tuple(chosen(one.function) for one in allowed.tools)
        return AllowedFunctions(mode=allowed.mode, tools=tools)
    return choice or "auto"
