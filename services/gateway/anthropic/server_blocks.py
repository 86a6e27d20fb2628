"""What tools that run at Anthropic did, as blocks of a conversation that began there. The results
are in the text that the model wrote from them, so the blocks are left out. The API's description is
made from these types."""

from __future__ import annotations

import msgspec


class ServerBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """A block of a tool that ran at Anthropic. Its fields are not read."""


class ServerToolUse(ServerBlock, frozen=True, kw_only=True, tag="server_tool_use"):
    """A call."""


class WebSearchResult(ServerBlock, frozen=True, kw_only=True, tag="web_search_tool_result"):
    """What a search of the web found."""


class WebFetchResult(ServerBlock, frozen=True, kw_only=True, tag="web_fetch_tool_result"):
    """A page of the web."""


class CodeResult(ServerBlock, frozen=True, kw_only=True, tag="code_execution_tool_result"):
    """What a program gave."""


class ShellResult(ServerBlock, frozen=True, kw_only=True, tag="bash_code_execution_tool_result"):
    """What a command gave."""


class EditorResult(
    ServerBlock, frozen=True, kw_only=True, tag="text_editor_code_execution_tool_result"
):
    """What an editor gave."""


class ToolSearchResult(ServerBlock, frozen=True, kw_only=True, tag="tool_search_tool_result"):
    """Tools that a search found."""


class AdvisorResult(ServerBlock, frozen=True, kw_only=True, tag="advisor_tool_result"):
    """What another model answered."""


class RemoteToolUse(ServerBlock, frozen=True, kw_only=True, tag="mcp_tool_use"):
    """A call of an MCP server's tool."""


class RemoteResult(ServerBlock, frozen=True, kw_only=True, tag="mcp_tool_result"):
    """What an MCP server's tool gave."""


AnyServerBlock = (
    ServerToolUse
    | WebSearchResult
    | WebFetchResult
    | CodeResult
    | ShellResult
    | EditorResult
    | ToolSearchResult
    | AdvisorResult
    | RemoteToolUse
    | RemoteResult
)
