"""`shardline run-batch`: a file of requests in, a file of answers out, over the gateway's batches.

What it has uploaded stands beside the output until that is whole: the same command again goes on
with the same batch, however the first one ended.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential

from shardline.base.errors import Conflict, Invalid, JobFailed, NotFound, Unavailable
from shardline.cli.local_stack import local_gateway

BASE_URL = "OPENAI_BASE_URL"
API_KEY = "OPENAI_API_KEY"
"""OpenAI's clients read them too."""

POLL_S = 1.0
PATIENCE_S = 600.0
"""A gateway that is away for longer ends the command, not the batch."""

TIMEOUT_S = 60.0
READ_BYTES = 1 << 20
ENDED = ("completed", "failed", "expired", "cancelled")
RETRIED = (408, 429, 502, 503, 504)


class UploadNote(msgspec.Struct, frozen=True, kw_only=True):
    """What was uploaded for an output, in a file beside it."""

    digest: str
    file_id: str


def run_batch(
    *,
    source: Annotated[
        Path,
        typer.Option("--input", "-i", exists=True, dir_okay=False, help="Requests, one a line."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Answers and errors, one a line.")],
    window: Annotated[
        str, typer.Option(help="Time that the batch may take: 30m, 24h, 7d.")
    ] = "24h",
    url: Annotated[
        str | None,
        typer.Option(
            envvar=BASE_URL,
            help=f"The gateway's /v1, with the key in {API_KEY}. Default: `make up`'s.",
        ),
    ] = None,
) -> None:
    """Run a file of requests as a batch, and wait. The same command again goes on with it."""
    with _gateway(url) as http:
        note = _uploaded(http, source, _note_path(output))
        asked = {
            "input_file_id": note.file_id,
            "endpoint": _endpoint(source),
            "completion_window": window,
        }
        key = {"Idempotency-Key": f"run-batch-{note.file_id}"}
        batch = _ask(http, "POST", "batches", json=asked, headers=key)
        batch = _wait(http, batch)
        if batch["status"] == "failed":
            _note_path(output).unlink(missing_ok=True)
            first = batch["errors"]["data"][0]
            where = f"line {first['line']}: " if first.get("line") else ""
            raise Invalid("--input", f"{where}{first['message']}", "Change the file")
        _write(http, batch, output)
    _note_path(output).unlink(missing_ok=True)
    counts = batch["request_counts"]
    typer.echo(f"{counts['completed']} of {counts['total']} lines completed", err=True)
    if counts["failed"] or batch["status"] != "completed":
        raise JobFailed(f"{counts['failed']} lines failed; the batch is {batch['status']}")


@contextmanager
def _gateway(url: str | None) -> Iterator[httpx.Client]:
    key = os.environ.get(API_KEY)
    if url is None:
        local = local_gateway(Path.cwd())
        if local is None:
            raise Invalid("--url", "there is no stack in this folder", f"Pass it, and {API_KEY}")
        url = f"{local.url}/v1"
        key = local.api_key
    headers = {"Authorization": f"Bearer {key or ''}"}
    try:
        with httpx.Client(
            base_url=f"{url.rstrip('/')}/", headers=headers, timeout=TIMEOUT_S
        ) as http:
            yield http
    except httpx.TransportError as error:
        raise Unavailable(f"the gateway at {url} cannot be reached", str(error)) from error


def _note_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.upload")


def _endpoint(source: Path) -> str:
    """What the first line names. Raises Invalid."""
    with source.open("rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
    try:
        return str(msgspec.json.decode(first)["url"])
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        problem = "its first line has no url of a route"
        raise Invalid("--input", problem, "Send custom_id, method, url and body") from error


def _uploaded(http: httpx.Client, source: Path, path: Path) -> UploadNote:
    """Uploads the file, unless it was. Raises Invalid where another one was."""
    with source.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if path.exists():
        note = msgspec.json.decode(path.read_bytes(), type=UploadNote)
        if note.digest != digest:
            remedy = f"Name another --output, or delete {path}"
            raise Invalid("--input", f"{path} is of another file", remedy)
        return note
    with source.open("rb") as content:
        form = {"file": (source.name, content)}
        sent = http.post("files", files=form, data={"purpose": "batch"}, timeout=None)
    uploaded = _checked(sent)
    note = UploadNote(digest=digest, file_id=uploaded["id"])
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(msgspec.json.encode(note))
    part.replace(path)
    return note


def _wait(http: httpx.Client, batch: dict[str, Any]) -> dict[str, Any]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        shown = progress.add_task(batch["status"], total=None)
        while True:
            counts = batch["request_counts"]
            progress.update(
                shown,
                description=batch["status"],
                total=counts["total"] or None,
                completed=counts["completed"] + counts["failed"],
            )
            if batch["status"] in ENDED:
                return batch
            time.sleep(POLL_S)
            batch = _ask(http, "GET", f"batches/{batch['id']}")


def _write(http: httpx.Client, batch: dict[str, Any], output: Path) -> None:
    """Writes all lines, or none."""
    part = output.with_name(f"{output.name}.part")
    for attempt in _patient():
        with attempt, part.open("wb") as lines:
            for name in ("output_file_id", "error_file_id"):
                if batch[name] is None:
                    continue
                with http.stream("GET", f"files/{batch[name]}/content") as reply:
                    if reply.status_code != 200:
                        reply.read()
                        _checked(reply)
                    for piece in reply.iter_bytes(READ_BYTES):
                        lines.write(piece)
    part.replace(output)


def _ask(http: httpx.Client, method: str, path: str, **content: Any) -> dict[str, Any]:
    for attempt in _patient():
        with attempt:
            return _checked(http.request(method, path, **content))
    raise AssertionError("the last attempt raises")


def _patient() -> Retrying:
    """Tries again while the gateway is away: a repeat of these requests does nothing twice."""
    return Retrying(
        retry=retry_if_exception(
            lambda error: isinstance(error, httpx.TransportError | Unavailable)
        ),
        wait=wait_exponential(multiplier=0.2, max=5),
        stop=stop_after_delay(PATIENCE_S),
        reraise=True,
    )


def _checked(reply: httpx.Response) -> dict[str, Any]:
    """The answer. Raises what its status says."""
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
