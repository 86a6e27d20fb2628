"""Errors for Anthropic's clients in Anthropic's form, and the header that they read. Knows no cause
of an error: it rewrites the answer that every route gives."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.anthropic.answers import ErrorDetails, MessagesError, MessagesErrorFields
from services.gateway.bodies import Error

PREFIX = "/v1/messages"
SHARED = "/v1/models"
"""OpenAI's clients ask there too, and send no `anthropic-version`."""
VERSION = "anthropic-version"
JSON = "application/json"
REQUEST_ID = "request-id"

OVERLOADED = 529
"""Anthropic's status of a service that has no room, where other routes have 503."""

TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.CONFLICT: "conflict_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
"""Anthropic's types by the statuses of other routes."""


def is_anthropics(path: str, headers: Headers) -> bool:
    """Whether an answer on this path is for Anthropic's clients."""
    return _is_below(PREFIX, path) or (_is_below(SHARED, path) and VERSION in headers)


def status_of(status: int) -> int:
    """Anthropic's status for that of other routes."""
    return OVERLOADED if status == HTTPStatus.SERVICE_UNAVAILABLE else status


def error_form(error: Error, status: int, request_id: str | None) -> MessagesError:
    """Anthropic's body of an error; `status` is that of other routes."""
    default = "api_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    fields = MessagesErrorFields(
        type=next((name for each, name in TYPES.items() if each == status), default),
        message=error.error.message,
        details=ErrorDetails(error_code=error.error.code, param=error.error.param),
    )
    return MessagesError(error=fields, request_id=request_id)


class ErrorFormMiddleware:
    """Gives each answer for Anthropic's clients its `request-id`, which is its `x-request-id`, and
    each error Anthropic's status and body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request as plain ASGI, so that a streamed answer passes through untouched."""
        if scope["type"] != "http" or not is_anthropics(scope["path"], Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, AnswerRewriter(send))


class AnswerRewriter:
    """Sends one answer. The body of an error, which is short, waits until it is whole."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        """Of an error, while its body is not whole."""
        self._body = b""

    async def __call__(self, message: Message) -> None:
        """Send a message of ASGI."""
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=list(message["headers"]))
            headers[REQUEST_ID] = headers.get("x-request-id", "")
            message = {**message, "headers": headers.raw}
            if message["status"] >= HTTPStatus.BAD_REQUEST and _is_json(headers):
                self._start = message
                return
        elif self._start is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_error(self._start)
            return
        await self._send(message)

    async def _send_error(self, start: Message) -> None:
        headers = MutableHeaders(raw=list(start["headers"]))
        error = msgspec.json.decode(self._body, type=Error)
        body = msgspec.json.encode(error_form(error, start["status"], headers[REQUEST_ID]))
        headers["content-length"] = str(len(body))
        status = status_of(start["status"])
        await self._send({**start, "status": status, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": body})


def _is_below(prefix: str, path: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")


def _is_json(headers: Headers) -> bool:
    return headers.get("content-type", "").startswith(JSON)
