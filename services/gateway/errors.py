"""Errors as OpenAI's error bodies with their status codes. Knows no route."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any
from uuid import UUID

import msgspec
import structlog
from fastapi import FastAPI, Request, Response
from msgspec import UNSET
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from services.gateway.anthropic.error_form import REQUEST_ID, error_form, is_anthropics
from services.gateway.bodies import Error, ErrorFields
from shardline.base.errors import (
    Conflict,
    ContextExceeded,
    Diverged,
    Invalid,
    JobCancelled,
    JobEnded,
    JobExpired,
    LimitExceeded,
    NotFound,
    Overload,
    ShardlineError,
    Unavailable,
    UnknownModel,
)
from shardline.contract.ids import new_id
from shardline.contract.job import Job, JobState
from shardline.contract.request_parsing import shown

log = structlog.get_logger(__name__)

MAX_MESSAGE_CHARS = 2_000
MAX_PARAM_CHARS = 128
"""Of an error, which may quote what was sent."""

TELL_AGAIN_S = 10.0
"""Between two lines of the log while every request fails."""

RETRY_AFTER_S = 1.0
NO_RETRY: Mapping[str, str] = MappingProxyType({"x-should-retry": "false"})
"""OpenAI's clients retry each 409 and 500 unless they learn that a retry cannot help."""

CLIENT_CLOSED_REQUEST = 499
"""No client reads this status; metrics count it."""


class TooLarge(Invalid):
    """A body over the limit."""


class HeadTooLarge(Invalid):
    """A request line and headers over the limit."""


class TooSlow(Invalid):
    """A head or a body that did not arrive in time."""


class MalformedRequest(Invalid):
    """Bytes that are no HTTP/1.1 request."""


class NotJson(Invalid):
    """A body that is not declared as JSON, as a form on any web page could send it."""


class PreviousNotFound(Invalid):
    """A response to go on from that is not there."""


class ThreadUnsupported(Invalid):
    """A conversation that the server is to hold. Anthropic's clients know the code, and send all of
    it then."""


class MisdirectedRequest(Invalid):
    """A request for another host."""


class Unauthorized(ShardlineError):
    """No valid API key."""

    def __init__(self, problem: str, *, had_key: bool = True) -> None:
        super().__init__(problem)
        self.challenge = 'Bearer realm="shardline"' + (', error="invalid_token"' if had_key else "")


class Forbidden(ShardlineError):
    """The API key is valid and does not allow this."""

    def __init__(self, problem: str, *, scope: str | None = None, field: str | None = None) -> None:
        super().__init__(problem)
        self.field = field
        named = f', error="insufficient_scope", scope="{scope}"' if scope else ""
        self.challenge = f'Bearer realm="shardline"{named}'


class Stopping(Unavailable):
    """The gateway stops before it has an answer. An accepted job continues."""

    def __init__(self, job_id: UUID | None = None) -> None:
        continues = (
            f"; the job continues: GET /v1/jobs/{job_id}" if job_id else ": send the request again"
        )
        super().__init__(f"this gateway is stopping{continues}")
        self.job_id = job_id


class InvalidJob(JobEnded):
    """A relay or a head found the request invalid after it was stored: the recorded reason."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(f"{error.get('field')}: {error.get('problem')}. {error.get('remedy')}")
        self.field = str(error.get("field"))


class OutageLog:
    """Logs what callers do not learn of a server that is away: at once, then every TELL_AGAIN_S."""

    def __init__(self) -> None:
        self._told_s = -math.inf
        self._num_untold = 0

    def tell(self, error: Unavailable) -> None:
        """Counts one request that it failed."""
        now_s = time.monotonic()
        self._num_untold += 1
        if now_s >= self._told_s + TELL_AGAIN_S:
            log.warning("requests fail", problem=str(error), num_requests=self._num_untold)
            self._told_s = now_s
            self._num_untold = 0


KINDS: tuple[tuple[type[ShardlineError], int, str, str], ...] = (
    (TooLarge, 413, "invalid_request_error", "request_too_large"),
    (HeadTooLarge, 431, "invalid_request_error", "request_head_too_large"),
    (MalformedRequest, 400, "invalid_request_error", "bad_request"),
    (TooSlow, 408, "invalid_request_error", "request_timeout"),
    (NotJson, 415, "invalid_request_error", "unsupported_media_type"),
    (MisdirectedRequest, 421, "invalid_request_error", "misdirected_request"),
    (Unauthorized, 401, "invalid_request_error", "invalid_api_key"),
    (Forbidden, 403, "invalid_request_error", "permission_denied"),
    (UnknownModel, 404, "invalid_request_error", "model_not_found"),
    (ContextExceeded, 400, "invalid_request_error", "context_length_exceeded"),
    (ThreadUnsupported, 400, "invalid_request_error", "thread_unsupported_request"),
    (PreviousNotFound, 400, "invalid_request_error", "previous_response_not_found"),
    (LimitExceeded, 429, "rate_limit_error", "rate_limit_exceeded"),
    (Invalid, 400, "invalid_request_error", "invalid_value"),
    (InvalidJob, 400, "invalid_request_error", "invalid_value"),
    (NotFound, 404, "invalid_request_error", "not_found"),
    (Conflict, 409, "invalid_request_error", "conflict"),
    (Diverged, 409, "job_restarted", "stream_diverged"),
    (Overload, 429, "rate_limit_error", "overloaded"),
    (Stopping, 503, "server_error", "gateway_stopping"),
    (Unavailable, 503, "server_error", "unavailable"),
    (JobCancelled, 409, "job_ended", "job_cancelled"),
    (JobExpired, 504, "job_ended", "job_expired"),
    (JobEnded, 500, "job_ended", "job_failed"),
)
"""The first that fits: error, status, OpenAI's type, code."""


CODES: Mapping[int, str] = {
    HTTPStatus.NOT_FOUND: "not_found",
    HTTPStatus.METHOD_NOT_ALLOWED: "method_not_allowed",
}
"""Of paths and methods without a route."""


def status_of(error: ShardlineError) -> int:
    """The HTTP status of an error."""
    return next((status for kind, status, _, _ in KINDS if isinstance(error, kind)), 500)


def body_of(error: ShardlineError) -> Error:
    """OpenAI's error object; `param` names the field."""
    for kind, _, name, code in KINDS:
        if isinstance(error, kind):
            job_id = getattr(error, "job_id", None)
            # What details name (hosts, users, statements) is for the log: a caller may be a
            # stranger.
            message = error.problem if isinstance(error, Unavailable) else str(error)
            return openai_error(
                message, name, code, param=getattr(error, "field", None), job_id=job_id
            )
    return openai_error(str(error), "server_error", "internal_error")


def error_of_job(job: Job, ended: JobEnded) -> JobEnded:
    """A request that only a relay could refuse is the caller's mistake, not the server's."""
    if (
        job.state is JobState.FAILED
        and job.error is not None
        and job.error.get("code") == "invalid_request"
    ):
        return InvalidJob(job.error)
    return ended


def respond(error: ShardlineError) -> Response:
    """The answer to a request that raised `error`."""
    headers = advice(error)
    if isinstance(error, Unauthorized | Forbidden):
        headers["WWW-Authenticate"] = error.challenge
    return json_response(body_of(error), status=status_of(error), headers=headers)


def advice(error: ShardlineError) -> dict[str, str]:
    """Returns the headers that advise whether to send a request again, and when."""
    if isinstance(error, LimitExceeded):
        return limit_headers(error)
    if isinstance(error, Overload):
        return retry_headers(error.retry_after_s)
    if isinstance(error, Unavailable | TooSlow):
        return retry_headers(RETRY_AFTER_S)
    return dict(NO_RETRY)


def limit_headers(error: LimitExceeded) -> dict[str, str]:
    """Returns what OpenAI's clients know of a limit: when to come again, and what is left."""
    after_s = error.retry_after_s
    headers = dict(NO_RETRY) if after_s is None else retry_headers(after_s)
    for kind, (limit, left) in error.left.items():
        headers[f"x-ratelimit-limit-{kind}"] = str(limit)
        headers[f"x-ratelimit-remaining-{kind}"] = str(left)
        if error.field == f"{kind}_per_min" and after_s is not None:
            headers[f"x-ratelimit-reset-{kind}"] = f"{math.ceil(after_s * 1000)}ms"
    return headers


def retry_headers(after_s: float) -> dict[str, str]:
    """Returns what tells clients to come again: OpenAI's read the milliseconds first."""
    return {
        "Retry-After": str(math.ceil(after_s)),
        "retry-after-ms": str(math.ceil(after_s * 1000)),
        "x-should-retry": "true",
    }


def json_response(
    document: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Encode a body."""
    content = msgspec.json.encode(document)
    return Response(
        content, status_code=status, headers=dict(headers or {}), media_type="application/json"
    )


def install(app: FastAPI) -> None:
    """Make the app answer every error in OpenAI's form."""
    outage = OutageLog()

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, ShardlineError)
        if isinstance(error, Unavailable) and error.details:
            outage.tell(error)
        request.app.state.gateway.metrics.refused.labels(body_of(error).error.code).inc()
        return respond(error)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        problem = str(error.detail)
        if error.status_code in CODES:
            # A client may have routes that this gateway does not: its caller learns which it was.
            route = f"{request.method} {shown(request.url.path)}"
            problem = f"{route}: there is no such route. GET /openapi.json has all"
        code = CODES.get(error.status_code, "http")
        body = openai_error(problem, "invalid_request_error", code)
        return json_response(body, status=error.status_code, headers=error.headers)

    async def gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def unexpected(request: Request, error: Exception) -> Response:
        # Outside of all middleware, so that the answer gets its id here, and the log line the same.
        request_id = str(new_id())
        log.error("request failed", path=request.url.path, request_id=request_id, exc_info=error)
        body = openai_error("The server failed; see its log", "server_error", "internal_error")
        headers = {**NO_RETRY, "x-request-id": request_id}
        if is_anthropics(request.url.path, request.headers):
            form = error_form(body, 500, request_id)
            return json_response(form, status=500, headers={**headers, REQUEST_ID: request_id})
        return json_response(body, status=500, headers=headers)

    app.add_exception_handler(ShardlineError, ours)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, unexpected)


def openai_error(
    message: str, kind: str, code: str, *, param: str | None = None, job_id: UUID | None = None
) -> Error:
    """The body of an error."""
    error = ErrorFields(
        message=message[:MAX_MESSAGE_CHARS],
        type=kind,
        param=None if param is None else param[:MAX_PARAM_CHARS],
        code=code,
        job_id=job_id or UNSET,
    )
    return Error(error=error)
