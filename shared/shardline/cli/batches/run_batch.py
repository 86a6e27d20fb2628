"""`shardline run-batch`: a file of requests in, a file of answers out, through a gateway's batches
or through Postgres alone.

A file next to the output records the upload until the output is whole: the same command again goes
on with the same batch, however the first one ended.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from shardline.base.errors import Invalid, JobFailed, Unavailable
from shardline.cli.batches.batch_door import BatchDoor, BatchState
from shardline.cli.batches.database_door import DatabaseDoor
from shardline.cli.batches.http_door import HttpDoor
from shardline.cli.database import asking
from shardline.cli.local_stack import local_gateway, named_database
from shardline.contract.batches.batch import ENDPOINTS

BASE_URL = "OPENAI_BASE_URL"
API_KEY = "OPENAI_API_KEY"
"""OpenAI's clients read them too."""

POLL_S = 1.0
UNTAKEN_S = 10.0
"""A gateway that is there takes a batch within seconds."""

PATIENCE_S = 600.0
"""A server that is away for longer ends the command, not the batch."""

Answer = TypeVar("Answer")


class UploadNote(msgspec.Struct, frozen=True, kw_only=True):
    """The upload for an output, recorded in a file next to it."""

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
            help=f"The gateway's /v1, with the key in {API_KEY}. Default: "
            "SHARDLINE_DATABASE_URL without a gateway, or `make up`'s.",
        ),
    ] = None,
    database: Annotated[
        str | None, typer.Option(help="URL of Postgres, which is asked instead of a gateway.")
    ] = None,
) -> None:
    """Run a file of requests as a batch, and wait. The same command again goes on with it."""
    with _door(url, database) as door:
        endpoint = _endpoint(source)
        note = _uploaded(door, source, _note_path(output))
        begin = partial(door.begin, note.file_id, endpoint=endpoint, window=window)
        batch = _patiently(begin)
        batch = _wait(door, batch)
        if batch.status == "failed":
            _note_path(output).unlink(missing_ok=True)
            raise Invalid("--input", batch.problem or "it is no batch", "Change the file")
        _patiently(partial(_write, door, batch, output))
    _note_path(output).unlink(missing_ok=True)
    typer.echo(f"{batch.num_completed} of {batch.num_lines} lines completed", err=True)
    if batch.num_failed or batch.status != "completed":
        raise JobFailed(f"{batch.num_failed} lines failed; the batch is {batch.status}")


@contextmanager
def _door(url: str | None, database: str | None) -> Iterator[BatchDoor]:
    """What is named, in this order: a database, a gateway, the environment's database, the stack of
    this folder. Raises Invalid where nothing is."""
    key = os.environ.get(API_KEY)
    local = local_gateway(Path.cwd())
    if database is None and url is None:
        named = named_database()
        database = None if local is not None and named == local.database else named
    if database is not None:
        with asking(database) as ask:
            yield DatabaseDoor(ask)
        return
    if url is None:
        if local is None:
            remedy = f"Pass it and {API_KEY}, or --database"
            raise Invalid("--url", "there is no stack in this folder", remedy)
        url = f"{local.url}/v1"
        key = local.api_key
    with HttpDoor.at(url, key or "") as http:
        yield http


def _note_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.upload")


def _endpoint(source: Path) -> str:
    """What the first line names. Raises Invalid."""
    with source.open("rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
    try:
        found = str(msgspec.json.decode(first)["url"])
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        problem = "its first line has no url of a route"
        raise Invalid("--input", problem, "Send custom_id, method, url and body") from error
    if found not in ENDPOINTS:
        problem = f"the url of its first line is {found[:64]!r}"
        raise Invalid("--input", problem, f"Use one of: {', '.join(ENDPOINTS)}")
    return found


def _uploaded(door: BatchDoor, source: Path, path: Path) -> UploadNote:
    """Uploads the file, unless it was. Raises Invalid where another one was."""
    with source.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if path.exists():
        note = msgspec.json.decode(path.read_bytes(), type=UploadNote)
        if note.digest != digest:
            remedy = f"Name another --output, or delete {path}"
            raise Invalid("--input", f"{path} is of another file", remedy)
        return note
    note = UploadNote(digest=digest, file_id=door.upload(source))
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(msgspec.json.encode(note))
    part.replace(path)
    return note


def _wait(door: BatchDoor, batch: BatchState) -> BatchState:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    untaken_s = time.monotonic() + UNTAKEN_S
    with Progress(*columns, console=Console(stderr=True)) as progress:
        shown = progress.add_task(batch.status, total=None)
        while True:
            progress.update(
                shown,
                description=batch.status,
                total=batch.num_lines or None,
                completed=batch.num_completed + batch.num_failed,
            )
            if batch.has_ended:
                return batch
            if not batch.is_taken and time.monotonic() >= untaken_s:
                untaken_s = float("inf")
                progress.console.print(
                    "no gateway has taken the batch yet; without one, "
                    "`python -m services.gateway.batches` does"
                )
            time.sleep(POLL_S)
            batch = _patiently(partial(door.look, batch))


def _write(door: BatchDoor, batch: BatchState, output: Path) -> None:
    """Writes all lines, or none."""
    part = output.with_name(f"{output.name}.part")
    with part.open("wb") as lines:
        for piece in door.answers(batch):
            lines.write(piece)
    part.replace(output)


def _patiently(ask: Callable[[], Answer]) -> Answer:
    """Asks again while the server is away: a repeat does nothing twice."""
    again = Retrying(
        retry=retry_if_exception_type(Unavailable),
        wait=wait_exponential(multiplier=0.2, max=5),
        stop=stop_after_delay(PATIENCE_S),
        reraise=True,
    )
    return again(ask)
