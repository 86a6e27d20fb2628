"""The OpenAPI description of bodies and answers, made from the contracts themselves. Checks
nothing: `parse_request` does, and mypy holds the routes to the types in `bodies`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI

from services.gateway import bodies
from services.gateway.errors import KINDS
from services.gateway.openai.requests import DEFAULT_COMPLETION_TOKENS
from shardline.contract.job import INTERACTIVE_PRIORITY, JobRequest

REF = "#/components/schemas/{name}"
JSON = "application/json"
EVENTS = "text/event-stream"
TEXT = "text/plain"

ANSWERS: tuple[Any, ...] = (
    bodies.Error,
    bodies.Completion,
    bodies.CompletionChunk,
    bodies.ChatCompletion,
    bodies.ChatChunk,
    bodies.JobAccepted,
    bodies.JobCancelling,
    bodies.JobList,
    bodies.JobDocument,
    bodies.CostList,
    bodies.JobDelta,
    bodies.Interrupted,
    bodies.ModelCard,
    bodies.ModelList,
    bodies.Health,
    bodies.Description,
    bodies.Readiness,
)

ANSWER_FIELDS: dict[str, Any] = {
    "stream": {
        "type": "boolean",
        "default": False,
        "description": "server-sent events instead of one answer",
    },
    "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
    "return_token_ids": {
        "type": "boolean",
        "default": False,
        "description": "adds prompt_token_ids and token_ids",
    },
    "max_completion_tokens": {"type": "integer", "description": "another name of max_tokens"},
}
CHAT_FIELDS: dict[str, Any] = {
    "logprobs": {"type": "boolean", "default": False},
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
}

RETRY_AFTER = "Retry-After"
CHALLENGE = "WWW-Authenticate"
REQUEST_ID = "x-request-id"
ERROR_HEADERS: Mapping[int, tuple[str, ...]] = {
    401: (CHALLENGE,),
    403: (CHALLENGE,),
    408: (RETRY_AFTER,),
    429: (RETRY_AFTER,),
    503: (RETRY_AFTER,),
}
GUARDED = (401, 403, 421, 429, 500, 503)
"""Statuses of every route that needs a key: its key, its host and the look-up of the key come
first."""

ANY = (400, 408, 431)
"""Statuses of any route: its request never came whole, or was none."""

TAKING = (400, 404, 408, 409, 413, 415)
"""Statuses of a route that takes jobs, for its body and its model."""


def body(name: str) -> dict[str, Any]:
    """The `openapi_extra` of a route that takes a job."""
    return {
        "requestBody": {"required": True, "content": {JSON: {"schema": _ref(name)}}},
        **parameters(
            header={"Idempotency-Key": {"type": "string", "minLength": 1, "maxLength": 256}}
        ),
    }


def parameters(**places: Mapping[str, Any]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads its query and headers itself: `query={name:
    schema}`."""
    found = [
        {"name": name, "in": place, "required": False, "schema": schema}
        for place, schemas in places.items()
        for name, schema in schemas.items()
    ]
    return {"parameters": found}


def chunks(name: str) -> dict[str, Any]:
    """Each event of a stream in OpenAI's form; the schema of a stream is its events'."""
    done = {"type": "object", "properties": {"data": {"const": "[DONE]"}}, "required": ["data"]}
    return {"anyOf": [_event({"anyOf": [_ref(name), _ref("Error")]}), done]}


def events(names: Mapping[str, str], event_id: Mapping[str, Any]) -> dict[str, Any]:
    """Each event of a stream of ours: its name → the schema of its data."""
    kinds = [
        _event(_ref(schema), event={"const": name}, id=event_id) for name, schema in names.items()
    ]
    return {"anyOf": kinds}


def _event(data: Mapping[str, Any], **fields: Mapping[str, Any]) -> dict[str, Any]:
    properties = {
        "data": {"type": "string", "contentMediaType": JSON, "contentSchema": data},
        **fields,
    }
    return {"type": "object", "properties": properties, "required": list(properties)}


def answer(
    what: str, contents: Mapping[str, str | dict[str, Any]], *, headers: tuple[str, ...] = ()
) -> dict[str, Any]:
    """One of a route's `responses`: media type → schema, or the name of one."""
    content = {
        media: {"schema": _ref(one) if isinstance(one, str) else one}
        for media, one in contents.items()
    }
    described = {name: {"required": True, "schema": {"type": "string"}} for name in headers}
    return {
        "description": what,
        "content": content,
        **({"headers": described} if described else {}),
    }


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route for the requests that it refuses."""
    codes = {status: [code for _, each, _, code in KINDS if each == status] for status in statuses}
    codes[500] = [*codes.get(500, ()), "internal_error"]
    return {
        status: answer(
            f"`code`: {', '.join(codes[status])}",
            {JSON: "Error"},
            headers=ERROR_HEADERS.get(status, ()),
        )
        for status in statuses
    }


class DocumentedApp(FastAPI):
    """An app with routes that read their requests themselves and still are described."""

    def openapi(self) -> dict[str, Any]:
        """FastAPI's description, with the bodies' schemas; without its own errors, which no route
        gives."""
        if self.openapi_schema is None:
            document = super().openapi()
            for operations in document["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
                    for status, described in errors(*ANY).items():
                        operation["responses"].setdefault(str(status), described)
            document.setdefault("components", {})["schemas"] = _components()
        return super().openapi()


def _ref(name: str) -> dict[str, str]:
    return {"$ref": REF.format(name=name)}


def _components() -> dict[str, Any]:
    _, components = msgspec.json.schema_components((JobRequest, *ANSWERS), ref_template=REF)
    job = components["JobRequest"]
    shared = {
        name: schema
        for name, schema in job["properties"].items()
        if name not in ("prompt", "messages")
    }
    shared["priority"] = {**shared["priority"], "default": INTERACTIVE_PRIORITY}
    length = {**job["properties"]["max_tokens"], "default": DEFAULT_COMPLETION_TOKENS}
    text = {**shared, "prompt": job["properties"]["prompt"], "max_tokens": length, **ANSWER_FIELDS}
    chat = {**shared, "messages": job["properties"]["messages"], **ANSWER_FIELDS, **CHAT_FIELDS}
    return {
        **components,
        "CompletionRequest": {
            "type": "object",
            "properties": text,
            "required": ["model", "prompt"],
        },
        "ChatCompletionRequest": {
            "type": "object",
            "properties": chat,
            "required": ["model", "messages"],
        },
    }
