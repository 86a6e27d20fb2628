"""OpenAI's own tools, which only its servers and models know. Declared, they are permissions that
the model does not use: they are left out of the prompt and of the answer. The API's description is
made from these types."""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from shardline.base.errors import Invalid

REMEDY = "Send auto, or choose functions"


class HostedTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """A tool without a description of its own, so that no prompt can show it. Its options are not
    read."""


class WebSearch(HostedTool, frozen=True, kw_only=True, tag="web_search"):
    """Searches the web."""


class DatedWebSearch(HostedTool, frozen=True, kw_only=True, tag="web_search_2025_08_26"):
    """Searches the web, in the version of a day."""


class WebSearchPreview(HostedTool, frozen=True, kw_only=True, tag="web_search_preview"):
    """Searches the web, in the first form."""


class DatedWebSearchPreview(
    HostedTool, frozen=True, kw_only=True, tag="web_search_preview_2025_03_11"
):
    """Searches the web, in the first form of a day."""


class FileSearch(HostedTool, frozen=True, kw_only=True, tag="file_search"):
    """Searches files that OpenAI stores."""


class CodeInterpreter(HostedTool, frozen=True, kw_only=True, tag="code_interpreter"):
    """Runs Python."""


class ImageGeneration(HostedTool, frozen=True, kw_only=True, tag="image_generation"):
    """Makes images."""


class RemoteServer(HostedTool, frozen=True, kw_only=True, tag="mcp"):
    """Calls the tools of an MCP server."""


class Computer(HostedTool, frozen=True, kw_only=True, tag="computer"):
    """Uses a screen and its keyboard."""


class ComputerPreview(HostedTool, frozen=True, kw_only=True, tag="computer_use_preview"):
    """Uses a screen and its keyboard, in the first form."""


class LocalShell(HostedTool, frozen=True, kw_only=True, tag="local_shell"):
    """Runs commands where the caller is."""


class Shell(HostedTool, frozen=True, kw_only=True, tag="shell"):
    """Runs commands."""


class ApplyPatch(HostedTool, frozen=True, kw_only=True, tag="apply_patch"):
    """Changes files."""


class ToolSearch(HostedTool, frozen=True, kw_only=True, tag="tool_search"):
    """Searches tools that the prompt does not list."""


AnyHosted = (
    WebSearch
    | DatedWebSearch
    | WebSearchPreview
    | DatedWebSearchPreview
    | FileSearch
    | CodeInterpreter
    | ImageGeneration
    | RemoteServer
    | Computer
    | ComputerPreview
    | LocalShell
    | Shell
    | ApplyPatch
    | ToolSearch
)
TYPES = frozenset(str(kind.__struct_config__.tag) for kind in get_args(AnyHosted))


def refuse_chosen(choice: Any) -> None:
    """Raises Invalid for a `tool_choice` that names one of them: nothing could obey it."""
    if not isinstance(choice, dict):
        return
    _refuse("tool_choice", choice)
    allowed = choice.get("tools")
    for place, tool in enumerate(allowed if isinstance(allowed, list) else ()):
        _refuse(f"tool_choice.tools[{place}]", tool)


def _refuse(field: str, choice: Any) -> None:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(kind, str) and kind in TYPES:
        problem = f"{kind!r} is a tool of OpenAI's own, and is left out"
        raise Invalid(f"{field}.type", problem, REMEDY)
