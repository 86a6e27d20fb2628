"""chaos.json and what people read of it. Knows no stack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import msgspec
import psycopg
from rich.console import Console
from rich.table import Table

from tests.chaos.report.finding import Finding
from tests.repository import REPOSITORY

ENDS = """
SELECT state, count(*), coalesce(sum(completion_tokens), 0)
FROM jobs LEFT JOIN results ON results.job_id = jobs.id WHERE jobs.id = ANY(%s) GROUP BY state
"""
FILE = REPOSITORY / ".local" / "chaos.json"


class Struck(msgspec.Struct, frozen=True, kw_only=True):
    """One fault that was injected."""

    at_s: float
    kind: str
    is_kill: bool
    took_s: float
    restarted: list[str] = []
    """Services on the path of a prompt that the fault ended."""
    recovery_s: float | None
    """From the end of the fault to a new token or end of a job accepted before it; None if there
    was none in time."""
    recovery_max_s: float = 0.0
    """What it may cost: see storm.py."""
    ended_s: float | None = None
    """From the end of the fault to the end of the next job."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    seed: int
    minutes: float
    dtype: str
    stages: int
    faults: dict[str, int]
    num_faults: int
    num_kills: int
    not_run: dict[str, str]
    accepted: int
    succeeded: int
    failed_expected: int
    """Jobs that were cancelled or expired because somebody asked for it."""
    held_back: int = 0
    """Of them, rows of the bulk load that were to run an hour later, and were cancelled when it
    ended."""
    batches: int = 0
    """Batches that ended."""
    batch_lines: int = 0
    """Their lines that became jobs."""
    tenant_jobs: int = 0
    """Jobs of tenants that are requests of the set."""
    tenants: dict[str, int] = {}
    """What they asked for and heard."""
    followed: int = 0
    """Jobs in canvases of a Celery app."""
    followed_loosely: int = 0
    """Of them, those near a moment in which Redis lost messages: the number of their calls proves
    nothing."""
    load: str = "lab"
    adapters: int = 0
    lost: int = 0
    exhausted: int = 0
    """Innocent jobs whose heads died under them `max_crashes` times in a row."""
    duplicated: int = 0
    token_mismatches: int = 0
    text_mismatches: int = 0
    logprob_mismatches: int = 0
    decision_mismatches: int = 0
    """Questions whose numbers are not those of the undisturbed pass, or of an equal question."""
    vector_mismatches: int = 0
    """Vectors and scores with other bits than the undisturbed pass."""
    invalid_calls: int = 0
    """Replies that had to call a tool and did not, or not by its schema."""
    adapter_mismatches: int = 0
    """Results whose provenance names another adapter than was asked for."""
    conflicts: int = 0
    """Equal repeats that were refused."""
    mistold: int = 0
    """Doors and clients that said something else than the row."""
    refused: int = 0
    """Good requests that a door refused, or answered with an error of its own."""
    admitted: int = 0
    """Requests beyond a limit that a door took, or answered with an error of its own."""
    callbacks: int = 0
    """What followed a Celery task never, twice, or with another value, and results that the backend
    does not have."""
    quotas: int = 0
    """Limits of a tenant that were exceeded, and reservations that were not settled."""
    pauses: int = 0
    """Attempts that began under a pause."""
    schedules: int = 0
    """Times with two jobs or none."""
    families: int = 0
    """Jobs that waited for others wrongly."""
    webhooks: int = 0
    """Ends that an endpoint heard nothing of, or something wrong."""
    bulk_acts: int = 0
    """What acts on many jobs did otherwise than they said."""
    stale_commits: int = 0
    stale_deltas: int = 0
    blamed: int = 0
    kv_blocks_leaked: int = 0
    orphans: int = 0
    told_secrets: int = 0
    """Prompts, keys and passwords in logs."""
    retracted: int = 0
    late_recoveries: int = 0
    stuck: int = 0
    growth: int = 0
    dead_threads: int = 0
    broken: int = 0
    """What a fault's own check missed: a clear refusal, a clear error at a door, a neighbor's
    crash."""
    worst_recovery_s: float = 0.0
    in_faults_s: float = 0.0
    between_faults_s: float = 0.0
    """Where the storm's time went: into faults, and into waiting until a job had ended after
    each."""
    rss_growth_mb: float = 0.0
    useful_tokens_per_s: float = 0.0
    streams_read: int = 0
    streams_rejoined: int = 0
    findings: list[str] = []
    struck: list[Struck] = []

    @property
    def holds(self) -> bool:
        """Every invariant."""
        return not self.findings

    def with_findings(self, findings: Sequence[Finding]) -> Report:
        """Counted in the field of each. Blocks of KV are counted already: one finding may be
        many."""
        counts = Counter(
            finding.count for finding in findings if finding.count != "kv_blocks_leaked"
        )
        return msgspec.structs.replace(
            self, findings=[str(finding) for finding in findings], **counts
        )


def kinds(struck: Sequence[Struck]) -> dict[str, int]:
    """How often each kind was injected."""
    return dict(Counter(each.kind for each in struck))


def achieved(database_url: str, ids: Sequence[UUID]) -> tuple[Counter[str], int]:
    """Jobs by state, and the tokens of those that succeeded."""
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(ENDS, (list(ids),)).fetchall()
    num_tokens = sum(int(num) for state, _, num in rows if state == "succeeded")
    return Counter({str(state): int(number) for state, number, _ in rows}), num_tokens


def write(report: Report, path: Path = FILE) -> None:
    """Where the next reader looks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))


def show(report: Report, console: Console) -> None:
    """A table, and every violation."""
    table = Table("figure", "value", title=f"Chaos, seed {report.seed}")
    for name in report.__struct_fields__:
        value = getattr(report, name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            table.add_row(name, f"{value:g}" if isinstance(value, float) else str(value))
    console.print(table)
    for kind, why in report.not_run.items():
        console.print(f"not run: {kind}: {why}")
    for finding in report.findings:
        console.print(f"[bold red]{finding}[/bold red]")
