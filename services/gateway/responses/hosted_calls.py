"""What OpenAI's own tools did, as items of a conversation that began there. The results are in the
text that the model wrote from them, so the items are left out. The API's description is made from
these types."""

from __future__ import annotations

import msgspec


class HostedCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """An item of a tool that ran at OpenAI. Its fields are not read."""


class WebSearchCall(HostedCall, frozen=True, kw_only=True, tag="web_search_call"):
    """A search of the web."""


class FileSearchCall(HostedCall, frozen=True, kw_only=True, tag="file_search_call"):
    """A search of files that OpenAI stores."""


class CodeInterpreterCall(HostedCall, frozen=True, kw_only=True, tag="code_interpreter_call"):
    """A run of Python."""


class ImageGenerationCall(HostedCall, frozen=True, kw_only=True, tag="image_generation_call"):
    """An image that a model made."""


class RemoteCall(HostedCall, frozen=True, kw_only=True, tag="mcp_call"):
    """A call of an MCP server's tool."""


class RemoteToolList(HostedCall, frozen=True, kw_only=True, tag="mcp_list_tools"):
    """The tools of an MCP server."""


class RemoteApprovalRequest(HostedCall, frozen=True, kw_only=True, tag="mcp_approval_request"):
    """Asks whether a tool of an MCP server may be called."""


class RemoteApproval(HostedCall, frozen=True, kw_only=True, tag="mcp_approval_response"):
    """Tells whether a tool of an MCP server may be called."""


AnyHostedCall = (
    WebSearchCall
    | FileSearchCall
    | CodeInterpreterCall
    | ImageGenerationCall
    | RemoteCall
    | RemoteToolList
    | RemoteApprovalRequest
    | RemoteApproval
)
