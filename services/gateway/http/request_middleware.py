"""What holds for every request and answer alike: a request id, HEAD, and paths that end in a slash.
Knows no route."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardline.contract.ids import new_id

REQUEST_ID = b"x-request-id"
GIVEN_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
"""Ids of callers that are given back; others may hold what breaks a log or a header."""

STREAMED = "/events"
REJOINED = b"stream=true"
"""Answers of such paths and queries have no end that a HEAD could wait for."""


class RequestMiddleware:
    """Gives each answer an `x-request-id`: the caller's own, else the one that the route gives (a
    job's id), else a new one. Hands HEAD on as GET, with the body left out by the server, and each
    path without a slash at its end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request as plain ASGI, so that a streamed answer passes through untouched."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == REQUEST_ID), b"").decode(
            "latin-1"
        )
        request_id = given if GIVEN_ID.fullmatch(given) else None

        async def name(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message["headers"]
                has_one = any(name == REQUEST_ID for name, _ in headers)
                if request_id is not None or not has_one:
                    others = (
                        [header for header in headers if header[0] != REQUEST_ID]
                        if has_one
                        else headers
                    )
                    new = (REQUEST_ID, (request_id or str(new_id())).encode())
                    message = {**message, "headers": [*others, new]}
            await send(message)

        path = scope["path"].rstrip("/") or "/"
        is_endless = path.endswith(STREAMED) or REJOINED in scope["query_string"]
        is_head = scope["method"] == "HEAD" and not is_endless
        await self._app(
            {**scope, "path": path, "method": "GET" if is_head else scope["method"]}, receive, name
        )
