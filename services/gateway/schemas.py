"""The OpenAPI description, made from the types that parse requests and build answers. Checks
nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import FastAPI

from services.gateway.bodies import Error
from services.gateway.errors import KINDS
from services.gateway.openai.bodies import OpenAiRequest
from services.gateway.openai.neutral_fields import ANY_NUMBER, ANY_OBJECT, ANY_TEXT
from shardline.contract.job import JobRequest

Kind = type[msgspec.Struct]
Schema = Mapping[str, Any]

REF = "#/components/schemas/{name}"
JSON = "application/json"
EVENTS = "text/event-stream"
TEXT = "text/plain"

END: Schema = {
    "type": "object",
    "properties": {"data": {"const": "[DONE]"}},
    "required": ["data"],
}
"""The last event of a stream in OpenAI's form."""

SCHEMAS = "x-schemas"
"""Where parts of the description carry the schemas that they refer to, until it is whole."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A media type with the schema of its content, and those that it refers to."""

    media: str = JSON
    schema: Schema
    schemas: Schema = field(default_factory=dict)


def body(kind: type[JobRequest]) -> dict[str, Any]:
    """The `openapi_extra` of a route that takes a job."""
    found = json_body(kind)
    properties = found[SCHEMAS][kind.__name__]["properties"]
    described = parameters(header={"Idempotency-Key": properties["idempotency_key"]})
    if issubclass(kind, OpenAiRequest):
        properties |= {name: neutral_schema(values) for name, values in kind.neutral.items()}
    return {**found, **described}


def json_body(kind: Kind) -> dict[str, Any]:
    """The `openapi_extra` of a route with a body that makes no job."""
    (schema,), schemas = _schemas(kind)
    content = {JSON: {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}, SCHEMAS: schemas}


def body_beside(own: Kind, *, without: Collection[str]) -> dict[str, Any]:
    """Returns the `openapi_extra` of a route that takes a job without some fields and with
    additional ones."""
    (schema, _), schemas = _schemas(own, JobRequest)
    described = body(JobRequest)
    inherited = schemas.pop(JobRequest.__name__)
    fields = {name: one for name, one in inherited["properties"].items() if name not in without}
    schemas[own.__name__]["properties"] = {**fields, **schemas[own.__name__]["properties"]}
    schemas[own.__name__]["required"] = ["model", *schemas[own.__name__]["required"]]
    content = {JSON: {"schema": schema}}
    return {**described, "requestBody": {"required": True, "content": content}, SCHEMAS: schemas}


def neutral_schema(values: tuple[Any, ...]) -> Schema:
    """A field without effect that may have one of these values."""
    if ANY_OBJECT in values:
        return {"type": ["object", "null"]}
    if ANY_NUMBER in values:
        return {"type": ["number", "null"]}
    return {"type": ["string", "null"]} if ANY_TEXT in values else {"enum": [*values, None]}


def parameters(**places: Mapping[str, Any]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads its query and headers itself: `query={name:
    schema}`."""
    found = [
        {"name": name, "in": place, "required": False, "schema": schema}
        for place, schemas in places.items()
        for name, schema in schemas.items()
    ]
    return {"parameters": found}


def chunks(kind: Kind) -> Content:
    """Each event of a stream in OpenAI's form; the schema of a stream is its events'."""
    (chunk, error), schemas = _schemas(kind, Error)
    schema = {"anyOf": [_event({"anyOf": [chunk, error]}), END]}
    return Content(media=EVENTS, schema=schema, schemas=schemas)


def typed_events(kinds: Sequence[Kind]) -> Content:
    """Returns the events of a stream that also has their names in their data, as `type`."""
    described, schemas = _schemas(*kinds)
    named = zip(kinds, described, strict=True)
    found = [_event(one, event={"const": kind.__struct_config__.tag}) for kind, one in named]
    return Content(media=EVENTS, schema={"anyOf": [*found, END]}, schemas=schemas)


def events(kinds: Mapping[str, Kind], event_id: Schema | None = None) -> Content:
    """Each event of a stream with names: its name → the type of its data."""
    described, schemas = _schemas(*kinds.values())
    named = zip(kinds, described, strict=True)
    ids = {} if event_id is None else {"id": event_id}
    found = [_event(schema, event={"const": name}, **ids) for name, schema in named]
    return Content(media=EVENTS, schema={"anyOf": found}, schemas=schemas)


def _event(data: Schema, **fields: Schema) -> Schema:
    encoded = {"type": "string", "contentMediaType": JSON, "contentSchema": data}
    properties = {"data": encoded, **fields}
    return {"type": "object", "properties": properties, "required": list(properties)}


def answer(what: str, *contents: Content | Kind, headers: tuple[str, ...] = ()) -> dict[str, Any]:
    """One of a route's `responses`; a type stands for its JSON."""
    found = [one if isinstance(one, Content) else _json(one) for one in contents]
    return {
        "description": what,
        "content": {one.media: {"schema": one.schema} for one in found},
        "headers": {name: {"required": True, "schema": {"type": "string"}} for name in headers},
        SCHEMAS: {name: schema for one in found for name, schema in one.schemas.items()},
    }


def _json(kind: Kind) -> Content:
    (schema,), schemas = _schemas(kind)
    return Content(schema=schema, schemas=schemas)


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route for the requests that it refuses."""
    codes = [*((status, code) for _, status, _, code in KINDS), (500, "internal_error")]
    found: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        named = ", ".join(code for each, code in codes if each == status)
        found[status] = answer(f"`code`: {named}", Error, headers=ERROR_HEADERS.get(status, ()))
    return found


class DocumentedApp(FastAPI):
    """An app with routes that read their requests themselves and still are described."""

    def openapi(self) -> dict[str, Any]:
        """FastAPI's description, with the bodies' schemas; without its own errors, which no route
        gives."""
        if self.openapi_schema is None:
            document = super().openapi()
            schemas: dict[str, Any] = {}
            for operation in [one for each in document["paths"].values() for one in each.values()]:
                answers = operation["responses"]
                answers.pop("422", None)
                for status, described in errors(*ANY).items():
                    answers.setdefault(str(status), described)
                for part in (operation, *answers.values()):
                    _merge(schemas, part.pop(SCHEMAS, {}))
            document.setdefault("components", {})["schemas"] = schemas
        return super().openapi()


def _merge(schemas: dict[str, Any], others: Schema) -> None:
    """Adds schemas to those of other routes. Two types of one name would describe each other."""
    for name, schema in others.items():
        known = schemas.setdefault(name, schema)
        assert known == schema, f"two types of bodies are named {name}"


def _schemas(*kinds: Kind) -> tuple[tuple[Schema, ...], dict[str, Any]]:
    return msgspec.json.schema_components(kinds, ref_template=REF)
