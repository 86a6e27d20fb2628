"""What a model cannot take has the name that the caller's own request gave it, at every door."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.integration.gateway.running_gateway import PROMPT

WRONG = {"type": "object", "properties": {"a": {"not": {}}}}
"""A schema that no grammar holds, at `properties.a`."""

TURNS = [{"role": "user", "content": PROMPT}]
FUNCTION = {"name": "look", "strict": True, "parameters": WRONG}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/completions": {"prompt": PROMPT},
    "/v1/responses": {"input": PROMPT},
    "/v1/messages": {"messages": TURNS, "max_tokens": 8},
}


def formatted(**schema: Any) -> dict[str, Any]:
    """OpenAI's `response_format` of a schema."""
    return {"type": "json_schema", "json_schema": {"name": "a", **schema}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (
            "/v1/chat/completions",
            {"response_format": formatted(schema=WRONG, strict=True)},
            "response_format.json_schema.schema.properties.a",
        ),
        (
            "/v1/completions",
            {"response_format": formatted(schema=WRONG, strict=True)},
            "response_format.json_schema.schema.properties.a",
        ),
        (
            "/v1/chat/completions",
            {"structured_outputs": {"json": WRONG}},
            "structured_outputs.json.properties.a",
        ),
        (
            "/v1/chat/completions",
            {
                "response_format": {"type": "json_object"},
                "tool_choice": "required",
                "tools": [{"type": "function", "function": FUNCTION}],
            },
            "tools[0].function.parameters",
        ),
        ("/v1/chat/completions", {"max_completion_tokens": 600}, "max_completion_tokens"),
        ("/v1/chat/completions", {"max_tokens": 600}, "max_tokens"),
        ("/v1/responses", {"tools": [{"type": "function", **FUNCTION}]}, "tools[0].parameters"),
        (
            "/v1/responses",
            {"tools": [{"type": "function", "name": "look"}] * 2},
            "tools[1].name",
        ),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": WRONG}}},
            "output_config.format.schema.properties.a",
        ),
        (
            "/v1/messages",
            {"output_format": {"type": "json_schema", "schema": WRONG}},
            "output_format.schema.properties.a",
        ),
        (
            "/v1/messages",
            {"tools": [{"name": "look", "strict": True, "input_schema": WRONG}]},
            "tools[0].input_schema",
        ),
        ("/v1/messages", {"tools": [{"name": "a", "input_schema": {}}] * 2}, "tools[1].name"),
    ],
)
async def test_an_error_names_the_field_of_the_request(
    http: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str
) -> None:
    reply = await http.post(path, json={"model": "clerk", **BODIES[path], **fields})
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["message"].startswith(f"{param}: ")
