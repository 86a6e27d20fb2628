"""The OpenAPI description of the bodies, made from the contracts themselves. Checks nothing: `parse_request` does."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

from shardline.job import INTERACTIVE_PRIORITY, JobRequest

ANSWER_FIELDS: dict[str, Any] = {
    "stream": {"type": "boolean", "default": False, "description": "server-sent events instead of one answer"},
    "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
    "return_token_ids": {"type": "boolean", "default": False, "description": "adds prompt_token_ids and token_ids"},
    "max_completion_tokens": {"type": "integer", "description": "another name of max_tokens"},
}
CHAT_FIELDS: dict[str, Any] = {
    "logprobs": {"type": "boolean", "default": False},
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
}


def body(name: str) -> dict[str, Any]:
    """For a route's `openapi_extra`."""
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


class Described(FastAPI):
    """An app whose routes read their bodies themselves and still are described."""

    def openapi(self) -> dict[str, Any]:
        """FastAPI's description, with the bodies' schemas."""
        document = super().openapi()
        document.setdefault("components", {}).setdefault("schemas", {}).update(_components())
        return document


def _components() -> dict[str, Any]:
    _, components = msgspec.json.schema_components((JobRequest,), ref_template="#/components/schemas/{name}")
    job = components["JobRequest"]
    shared = {name: schema for name, schema in job["properties"].items() if name not in ("prompt", "messages")}
    shared["priority"] = {**shared["priority"], "default": INTERACTIVE_PRIORITY}
    text = {**shared, "prompt": job["properties"]["prompt"], **ANSWER_FIELDS}
    chat = {**shared, "messages": job["properties"]["messages"], **ANSWER_FIELDS, **CHAT_FIELDS}
    return {
        **components,
        "CompletionRequest": {"type": "object", "properties": text, "required": ["model", "prompt"]},
        "ChatCompletionRequest": {"type": "object", "properties": chat, "required": ["model", "messages"]},
    }
