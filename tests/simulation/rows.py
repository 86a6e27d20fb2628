"""The tables in memory, and an audit beside them. Knows no statement: their twins are in
`statements`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import msgspec

from shardline.contract.job import FinishReason, JobState
from shardline.store.connection.encoding import Key


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A row of `jobs`."""

    id: UUID
    number: int
    """Order of creation."""
    prompt_ids: tuple[int, ...]
    params: Mapping[str, Any]
    max_tokens: int
    seed: int
    created_s: float
    not_before_s: float
    model: str = "m"
    priority: int = 5
    deadline_s: float | None = None
    cancel_s: float | None = None
    sent_s: float | None = None
    num_sends: int = 0
    state: JobState = JobState.QUEUED
    fence: int = 0
    lease_s: float | None = None
    worker: str | None = None
    pipeline: str | None = None
    requeued_s: float | None = None
    crashes: int = 0
    max_crashes: int = 3
    retry: Mapping[str, Any] | None = None
    exactness: str | None = None
    exact: bool = True
    error: Mapping[str, Any] | None = None

    @property
    def order(self) -> tuple[int, float, int]:
        """ORDER BY priority, created_at, id."""
        return self.priority, self.created_s, self.number

    def holds(self, fence: int, state: JobState) -> bool:
        """It is in this state under this fence."""
        return self.fence == fence and self.state is state


def crash_limits(number: int, *, is_poisoned: bool) -> dict[str, Any]:
    """Of every second job a policy, as its row has it."""
    if number % 2:
        return {"max_crashes": 2 if is_poisoned else 100}
    return {"retry": {"max_attempts": 2 if is_poisoned else 32, "max_backoff_s": 2.0}}


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """A row of `attempts`."""

    pipeline: str
    epoch: int
    worker: str
    tokens: tuple[int, ...]
    num_resumed: int
    outcome: str | None = None
    parked: bool = False


class EndRow(msgspec.Struct, kw_only=True):
    """An end as END gets it; the columns of a result are null without one."""

    job_id: UUID
    fence: int
    state: JobState
    error: dict[str, Any] | None
    text: str = ""
    token_ids: tuple[int, ...] | None = None
    finish_reason: FinishReason | None = None
    exact: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class ResultRow:
    """A row of `results`."""

    fence: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    exact: bool


@dataclass(slots=True, kw_only=True, eq=False)
class PipelineRow:
    """A row of `pipelines`."""

    model: str
    epoch: int
    head: str
    lease_s: float
    ready_s: float | None = None
    seats: int = 0
    exact: bool = False
    kv_tokens: int | None = None


@dataclass(slots=True, eq=False)
class Tables:
    """All rows, the clock that every statement reads, and the audit."""

    clock: Callable[[], float]
    started_s: float = -math.inf
    """When Postgres was started last."""
    jobs: dict[UUID, Job] = field(default_factory=dict)
    locked: set[UUID] = field(default_factory=set)
    """Jobs whose rows an open transaction of their tenant has."""
    attempts: dict[Key, Attempt] = field(default_factory=dict)
    results: dict[UUID, ResultRow] = field(default_factory=dict)
    pipelines: dict[str, PipelineRow] = field(default_factory=dict)
    models: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    on_bell: list[Callable[[], None]] = field(default_factory=list)
    stale_writes: list[str] = field(default_factory=list)
    granted_s: dict[Key, float] = field(default_factory=dict)
    """Until when each claim was ever allowed to run."""
    lease_s: float | None = None
    """Of every lease. None: they are not audited."""
    renewed_s: dict[Key, float] = field(default_factory=dict)
    """When each claim's holder was heard last."""
    wrong_leases: list[str] = field(default_factory=list)
    saved: dict[UUID, tuple[int, ...]] = field(default_factory=dict)
    """The longest checkpoint ever committed."""

    @property
    def now_s(self) -> float:
        """now()."""
        return self.clock()

    def is_past(self, deadline_s: float | None) -> bool:
        """There is a deadline, and it is over."""
        return deadline_s is not None and deadline_s <= self.now_s

    def select(self, ids: Iterable[UUID | str]) -> list[Job]:
        """Those that exist, in order of id."""
        wanted = {UUID(str(job_id)) for job_id in ids}
        return [job for job_id in sorted(wanted) if (job := self.jobs.get(job_id))]

    def lock(self, ids: Iterable[UUID | str]) -> list[Job]:
        """Those that exist and nobody else has locked: FOR UPDATE SKIP LOCKED."""
        return [job for job in self.select(ids) if job.id not in self.locked]

    def insert(self, job: Job) -> None:
        """Accepted."""
        self.jobs[job.id] = job
        self.ring()

    def ring(self) -> None:
        """NOTIFY."""
        for bell in self.on_bell:
            bell()

    def grant(self, job: Job, lease_s: float) -> None:
        """A lease is given."""
        job.lease_s = lease_s
        self.renewed_s[job.id, job.fence] = self.clock()
        self.granted_s[job.id, job.fence] = lease_s

    def cut_short(self, job: Job) -> None:
        """A lease ends now."""
        job.lease_s = self.clock()
        self.renewed_s[job.id, job.fence] = self.clock() - (self.lease_s or 0.0)

    def save(self, key: Key, tokens: tuple[int, ...]) -> None:
        """A checkpoint is written."""
        self.attempts[key].tokens = tokens
        if len(tokens) > len(self.saved.get(key[0], ())):
            self.saved[key[0]] = tokens

    def end(self, job: Job, one: EndRow) -> None:
        """A job ends, with its attempt and its result."""
        self.audit(job, one.fence, f"end {one.state}")
        job.state = one.state
        job.error = one.error
        job.lease_s = None
        attempt = self.attempts.get((job.id, job.fence))
        if attempt is not None:
            attempt.outcome = attempt.outcome or one.state
            attempt.tokens = attempt.tokens if one.token_ids is None else one.token_ids
        if one.finish_reason is not None:
            assert job.id not in self.results, "the primary key of results"
            self.results[job.id] = ResultRow(
                fence=job.fence,
                token_ids=one.token_ids or (),
                text=one.text,
                finish_reason=one.finish_reason,
                exact=one.exact and job.exact,
            )

    def audit_leases(self, expired: Collection[Job]) -> None:
        """A sweep takes exactly those whose holder was silent for a lease by this clock."""
        for job in self.lock(self.jobs):
            if self.lease_s is None or job.state is not JobState.RUNNING:
                continue
            is_over = self.renewed_s[job.id, job.fence] + self.lease_s < self.clock()
            if is_over != (job in expired):
                what = "is not over" if job in expired else "goes on"
                self.wrong_leases.append(
                    f"{job.id} at fence {job.fence}: its lease {what} at {self.clock():.1f} s"
                )

    def audit(self, job: Job, fence: int, what: str) -> None:
        """Every write by a claim's holder, or in its place, passes here."""
        if job.fence != fence or job.state.terminal:
            self.stale_writes.append(
                f"{what} under fence {fence} of a {job.state} job at fence {job.fence}"
            )


Rows = list[dict[str, Any]]
"""What a statement returns."""

Twin = Callable[..., Rows | int]
"""Does what a statement does: gets the tables and the statement's parameters. An int is the number
of changed rows."""
