"""What the arguments of a forced tool call must be: an object of the named properties alone."""

from __future__ import annotations

from typing import Any

from shardline.contract.chat import FunctionDefinition
from shardline.contract.structured_output import closed, lenient


def arguments_schema(function: FunctionDefinition) -> dict[str, Any]:
    """Returns the JSON schema of a call's arguments, which are an object in any case. What this
    accepts, the tool's own schema accepts too, but for what no grammar holds, unless it is
    strict."""
    schema = {"type": "object", **(function.schema or {"properties": {}})}
    return closed(schema if function.strict else lenient(schema))
