"""The gateway's own description of its API, and answers held to it. Knows no server."""

from __future__ import annotations

from http import HTTPStatus

import httpx
import schemathesis
from schemathesis.config import SchemathesisConfig

from services.gateway.app import create_app
from services.gateway.settings import GatewaySettings

JSON = "application/json"
DOCUMENT = create_app(GatewaySettings()).openapi()
SIGNED = SchemathesisConfig.from_dict({"generation": {"with-security-parameters": False}})
"""Requests of every kind are sent with a valid key."""

API = schemathesis.openapi.from_dict(DOCUMENT, config=SIGNED)
LABELS = sorted(
    f"{method.upper()} {path}"
    for path, operations in DOCUMENT["paths"].items()
    for method in operations
)
NOWHERE = {
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.METHOD_NOT_ALLOWED,
    HTTPStatus.MISDIRECTED_REQUEST,
}
"""Of a path or a method that the API does not have."""


async def check_answer(response: httpx.Response) -> None:
    """An event hook of httpx: status, media type, headers and, unless it is a stream, body are as
    described."""
    request = response.request
    asked = f"{request.method} {request.url.path}: {response.status_code}"
    media = response.headers.get("content-type", "").partition(";")[0]
    if request.method in ("HEAD", "OPTIONS"):
        # Described with GET, or not ours: a question of a browser about another origin.
        return
    operation = API.find_operation_by_path(request.method, request.url.path.rstrip("/"))
    if operation is None:
        assert (response.status_code in NOWHERE, media) == (True, JSON), asked
        return
    described = DOCUMENT["paths"][operation.path][request.method.lower()]["responses"].get(
        str(response.status_code)
    )
    assert described is not None, f"{asked} is not described"
    assert media in described["content"], f"{asked} has another media type: {media}"
    assert all(name in response.headers for name in described.get("headers", ())), (
        f"{asked}: {response.headers}"
    )
    if media == JSON:
        # Without the request's body, which may be gone.
        asked_for = httpx.Request(request.method, request.url)
        whole = httpx.Response(
            response.status_code,
            headers=response.headers,
            content=await response.aread(),
            request=asked_for,
        )
        whole.elapsed = response.elapsed
        operation.validate_response(whole)
