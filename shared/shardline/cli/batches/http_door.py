"""Batches through a gateway. Knows no database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from shardline.base.errors import Conflict, Invalid, NotFound, Unavailable
from shardline.cli.batches.batch_door import BatchState, key_of, problem_of
from shardline.cli.http_client import http_client
from shardline.contract.batches.batch import PURPOSE

TIMEOUT_S = 60.0
READ_BYTES = 1 << 20
RETRIED = (408, 429, 502, 503, 504)


class HttpDoor:
    """A gateway's routes for files and batches."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    @classmethod
    @contextmanager
    def at(cls, url: str, key: str) -> Iterator[HttpDoor]:
        """The door of a gateway; `url` ends in /v1."""
        headers = {"Authorization": f"Bearer {key}"}
        try:
            http = http_client(url, timeout_s=TIMEOUT_S, headers=headers)
        except httpx.TransportError as error:
            raise Unavailable(f"the gateway at {url} cannot be reached", str(error)) from error
        with http:
            yield cls(http)

    def upload(self, source: Path) -> str:
        """Sends a file."""
        with source.open("rb") as content, self._reachable():
            form = {"file": (source.name, content)}
            sent = self._http.post("files", files=form, data={"purpose": PURPOSE}, timeout=None)
        return str(_checked(sent)["id"])

    def begin(self, file_id: str, *, endpoint: str, window: str) -> BatchState:
        """Makes a batch of a file, or finds the one that was made of it."""
        asked = {
            "input_file_id": file_id,
            "endpoint": endpoint,
            "completion_window": window,
        }
        key = {"Idempotency-Key": key_of(file_id)}
        return self._ask("POST", "batches", json=asked, headers=key)

    def look(self, batch: BatchState) -> BatchState:
        """The batch as it is now."""
        return self._ask("GET", f"batches/{batch.id}")

    def answers(self, batch: BatchState) -> Iterator[bytes]:
        """The contents of the batch's files."""
        for name in batch.parts:
            with self._reachable(), self._http.stream("GET", f"files/{name}/content") as reply:
                if reply.status_code != 200:
                    reply.read()
                    _checked(reply)
                yield from reply.iter_bytes(READ_BYTES)

    def _ask(self, method: str, path: str, **content: Any) -> BatchState:
        with self._reachable():
            return _state(_checked(self._http.request(method, path, **content)))

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            url = self._http.base_url
            raise Unavailable(f"the gateway at {url} cannot be reached", str(error)) from error


def _state(batch: dict[str, Any]) -> BatchState:
    counts = batch["request_counts"]
    errors = batch["errors"]["data"] if batch["errors"] else ()
    problems = [problem_of(each["message"], each.get("line")) for each in errors]
    names = (batch["output_file_id"], batch["error_file_id"])
    return BatchState(
        id=batch["id"],
        status=batch["status"],
        num_lines=counts["total"],
        num_completed=counts["completed"],
        num_failed=counts["failed"],
        parts=tuple(name for name in names if name is not None),
        problem=problems[0] if problems else None,
    )


def _checked(reply: httpx.Response) -> dict[str, Any]:
    """Returns the answer. Raises the error of its status."""
    if reply.is_success:
        found: dict[str, Any] = reply.json()
        return found
    try:
        message = str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the gateway answers {reply.status_code}"
    if reply.status_code in RETRIED:
        raise Unavailable(message)
    if reply.status_code == 404:
        raise NotFound(message)
    if reply.status_code == 409:
        raise Conflict(message)
    raise Invalid("run-batch", message, "See docs/doors.md")
