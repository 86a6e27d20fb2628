"""How jobs, models and pipelines look: tables and text for people, one JSON document a line for
programs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from shardline.contract.job import Job, JobState, JobSummary, Result, Usage
from shardline.store.api_keys import ApiKey
from shardline.store.dead_letters import DeadLetter
from shardline.store.pipelines import LivePipeline

PROMPT_CHARS = 48
CONTROL_CHARS = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"
}
"""A terminal obeys them: names and completions are anybody's, and must not move its cursor or set
its title."""

UUID_CHARS = 36
PIPE_CHARS = 300
COLORS = {
    JobState.SUCCEEDED: "green",
    JobState.RUNNING: "cyan",
    JobState.FAILED: "red",
    JobState.CANCELLED: "yellow",
    JobState.EXPIRED: "yellow",
}


Document = TypeVar("Document")


class PlainTable(Table):
    """A table with cells of text, never markup: a model may be called `[/red]`."""

    @override
    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        plain = (Text(printable(cell)) if isinstance(cell, str) else cell for cell in cells)
        super().add_row(*plain, **options)


def printable(text: str) -> str:
    """The text with its control characters spelled out, but line breaks and tabs."""
    return text.translate(CONTROL_CHARS)


def output(result: Result) -> None:
    """What a job made: its completion, or an encoder's vector or score as JSON."""
    made = result.score if result.embedding is None else result.embedding
    completion(result.text if made is None else msgspec.json.encode(made).decode())


def completion(text: str, *, nl: bool = True) -> None:
    """Print a completion, or a piece of it: to a program as it is, to a terminal what it can
    show."""
    typer.echo(printable(text) if sys.stdout.isatty() else text, nl=nl)


def as_json(document: object) -> None:
    """Print a document as one line of JSON."""
    typer.echo(msgspec.json.encode(document).decode())


def each(
    documents: Sequence[Document], *, json: bool, table: Callable[[Sequence[Document]], None]
) -> None:
    """Print rows as lines of JSON, or together as a table."""
    if not json:
        table(documents)
        return
    for document in documents:
        as_json(document)


def jobs_table(jobs: Iterable[JobSummary]) -> None:
    """Print a table with one job per row."""
    table = new_table("job", "state", "model", "created", "tokens", "prompt")
    for job in jobs:
        tokens = str(job.usage.completion_tokens) if job.usage else ""
        table.add_row(
            str(job.id),
            Text("waits") if job.waits_for_parents else _state(job.state),
            job.model,
            _time(job.created_at),
            tokens,
            _short(job.prompt_start),
        )
    print_table(table)


def job_details(job: Job) -> None:
    """All that a person asks about one job, its completion last."""
    facts: dict[str, object] = {
        "job": job.id,
        "state": _state(job.state),
        "model": job.model,
        "priority": job.priority,
        "created": _time(job.created_at),
        "finished": _time(job.finished_at),
        "attempts": job.fence,
        "crashes": job.crashes or None,
        **_retries(job),
        "replay of": job.replay_of,
        "waits for": "\n".join(map(str, job.waits_for)),
        "prompt": _short(job.prompt),
        **_reasons(job.error or {}),
        **_result(job),
    }
    table = PlainTable.grid(padding=(0, 2))
    for name, value in facts.items():
        if value is not None and value != "":
            table.add_row(
                Text(name, style="bold"), value if isinstance(value, Text) else str(value)
            )
    print_table(table)
    if job.result is not None:
        typer.echo()
        output(job.result)
        for call in job.result.tool_calls:
            completion(f"{call.function.name}({call.function.arguments})")


def dead_table(jobs: Iterable[JobSummary]) -> None:
    """Print a table with one dead letter per row."""
    table = new_table("job", "model", "failed", "crashes", "prompt")
    for job in jobs:
        crashes = str((job.error or {}).get("crashes", job.crashes))
        table.add_row(
            str(job.id), job.model, _time(job.finished_at), crashes, _short(job.prompt_start)
        )
    print_table(table)


def dead_details(letter: DeadLetter) -> None:
    """Print the job and its attempts, the newest first."""
    job_details(letter.job)
    table = new_table(
        "attempt", "outcome", "tokens", "started", "last heartbeat", "worker", "pipeline"
    )
    for attempt in letter.attempts:
        tokens = f"{attempt.num_resumed} → {attempt.num_tokens}"
        times = _time(attempt.started_at), _time(attempt.heartbeat_at)
        table.add_row(
            str(attempt.fence), attempt.outcome, tokens, *times, attempt.worker, attempt.pipeline
        )
    typer.echo()
    print_table(table)
    for job_id in letter.replays:
        typer.echo(f"replayed as {job_id}")


def keys_table(keys: Iterable[ApiKey]) -> None:
    """Print a table with one key per row."""
    table = new_table("key", "name", "tenant", "scopes", "created", "expires", "last used", "state")
    for key in keys:
        times = _time(key.created_at), _time(key.expires_at), _time(key.last_used_at)
        state = "revoked" if key.revoked_at else "replaced" if key.replaced_at else ""
        table.add_row(key.id, key.name, key.tenant, " ".join(key.scopes), *times, state)
    print_table(table)


def pipelines_table(pipelines: Iterable[LivePipeline]) -> None:
    """One stage a row, under its pipeline."""
    table = new_table(
        "pipeline", "model", "state", "epoch", "seats", "exact", "layers", "device", "worker"
    )
    for pipeline in pipelines:
        exact = "yes" if pipeline.exact else "no"
        row: list[str | Text] = [
            pipeline.id,
            pipeline.model,
            readiness(pipeline),
            str(pipeline.epoch),
            str(pipeline.seats),
            exact,
        ]
        for stage in pipeline.stages or [{}]:
            table.add_row(
                *row, layers(stage), str(stage.get("device", "")), str(stage.get("worker", ""))
            )
            row = ["" for _ in row]
    print_table(table)


def readiness(pipeline: LivePipeline) -> Text:
    """Whether a generation can pass through every stage."""
    return Text("ready", style="green") if pipeline.ready else Text("not ready", style="red")


def models_table(models: Iterable[Mapping[str, Any]]) -> None:
    """Print a table with one model per row."""
    table = new_table("model", "revision", "context", "vocabulary", "ready", "weights", "adapters")
    for model in models:
        sizes = str(model["context_length"]), str(model["vocab_size"])
        table.add_row(
            model["name"],
            (model["revision"] or "")[:12],
            *sizes,
            "yes" if model["ready"] else "no",
            model["fingerprint"][:12],
            "\n".join(sorted(model["adapters"])),
        )
    print_table(table)


def _result(job: Job) -> dict[str, object]:
    result = job.result
    if result is None:
        return {}
    return {
        "finish reason": result.finish_reason,
        "tokens": f"{result.usage.prompt_tokens} in{_cached(result.usage)}, "
        f"{result.usage.completion_tokens} out",
        "reasoning": f"{result.usage.reasoning_tokens} tokens" if result.reasoning else None,
        "exact": "yes" if result.exact else "no",
        "worker": result.provenance.get("worker"),
        "timings": ", ".join(
            f"{name.removesuffix('_s')} {value:.3f} s" for name, value in result.timings.items()
        ),
    }


def _retries(job: Job) -> dict[str, object]:
    policy = job.retry
    if policy is None:
        return {}
    failures = ", ".join(policy.on)
    waits = f"{policy.backoff_s:g} to {policy.max_backoff_s:g} s"
    return {
        "retry": f"{policy.max_attempts} attempts after {failures}, waits {waits}",
        "next attempt": _time(job.next_attempt_at) if job.fence else None,
    }


def _cached(usage: Usage) -> str:
    return f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""


def _reasons(error: Mapping[str, Any]) -> dict[str, object]:
    return {name: error.get(name) for name in ("field", "problem", "remedy", "message")}


def layers(stage: Mapping[str, Any]) -> str:
    """A stage's layers: stored as [first, one past the last], shown as people count."""
    held = stage.get("layers")
    return (
        f"{held[0]}-{held[1] - 1}" if isinstance(held, list) and len(held) == 2 else str(held or "")
    )


def _state(state: JobState) -> Text:
    return Text(state, style=COLORS.get(state, ""))


def _time(time: datetime | None) -> str:
    return "" if time is None else time.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _short(prompt: str | None) -> Text:
    """The text in one line; markup in it is shown, not interpreted."""
    line = " ".join((prompt or "").split())
    return Text(printable(line if len(line) <= PROMPT_CHARS else line[: PROMPT_CHARS - 1] + "…"))


def new_table(*columns: str) -> PlainTable:
    """A table without lines, which cuts no cell in two."""
    table = PlainTable(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True, min_width=UUID_CHARS if column == "job" else None)
    return table


def print_table(table: Table) -> None:
    """Print it; through a pipe nothing is cut to fit."""
    is_terminal = sys.stdout.isatty()
    Console(highlight=False, width=None if is_terminal else PIPE_CHARS).print(table)
