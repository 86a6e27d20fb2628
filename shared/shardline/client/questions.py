"""The questions of all clients: which call of the store answers each, and which answers are errors.

Without I/O: each function checks what a caller passed and returns a question, a function of a
connection, which a client calls in a transaction, for threads or for asyncio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar
from uuid import UUID

from sqlalchemy import Connection

from shardline.base.errors import Invalid, NotFound
from shardline.client.requests import MAX_REQUESTS, succeeded
from shardline.contract.choices import check_n, choices_of
from shardline.contract.decision import Decision
from shardline.contract.ids import JobId, as_id, as_ids, one_or_many
from shardline.contract.job import Job, JobRequest, JobState, JobSummary
from shardline.contract.job_filter import AnyFilter, parse_filter
from shardline.store import bulk_acts, dead_letters, jobs, listing
from shardline.store.bulk_acts import Act, BulkAct, BulkProgress, bulk_act
from shardline.store.dead_letters import DeadLetter
from shardline.store.family_inserts import insert_all_families
from shardline.store.inserts import encode_choices
from shardline.store.listing import PageEnd
from shardline.store.statistics.reports import states

MAX_IDS_PER_QUERY = 1_000

Answer = TypeVar("Answer")
Question = Callable[[Connection], Answer]

# Names for annotations: inside the clients `list` is the method.
Decisions = list[Decision]
Scores = list[float]
Vectors = list[tuple[float, ...]]
Ids = list[UUID]
Jobs = list[Job]
Summaries = list[JobSummary]
States = dict[UUID, JobState]


def insert(requests: Sequence[JobRequest], n: int = 1) -> Question[Ids]:
    """Store `n` choices of each of them, or none at all; ids in the same order, the choices of a
    request side by side. Raises Invalid, Conflict."""
    check_number(len(requests), n)
    encoded = [encode_choices(choices_of(request, n)) for request in requests]
    return lambda connection: [
        job_id
        for one in insert_all_families(connection, encoded)
        for job_id in (one.job_id, *one.others)
    ]


def check_number(num_requests: int, n: int) -> None:
    """Raises Invalid for choices that are more jobs than one call may store."""
    check_n(n)
    if num_requests * n > MAX_REQUESTS:
        raise Invalid("n", f"it makes over {MAX_REQUESTS} jobs", "Send them in several calls")


def get_many(ids: Iterable[JobId]) -> Question[Jobs]:
    """Read those that exist, in the order of `ids`."""
    return partial(_jobs, ids=as_ids(ids))


def rows(connection: Connection, ids: Sequence[UUID]) -> list[Job | None]:
    """Returns the job of each id, for callers of different jobs."""
    found = {job.id: job for job in jobs.get_jobs(connection, list(set(ids)))}
    return [found.get(job_id) for job_id in ids]


def existing(found: Answer | None, job_id: UUID) -> Answer:
    """Returns what was found of a job. Raises NotFound."""
    if found is None:
        raise NotFound(f"no job has the id {job_id}")
    return found


def list_jobs(
    state: JobState | None,
    model: str | None,
    limit: int,
    after: JobId | PageEnd | None,
    tenant: str | None = None,
) -> Question[Summaries]:
    """Read one page, of one tenant or of all. Raises Invalid."""
    end = after if after is None or isinstance(after, PageEnd) else as_id(after, "after")
    query = listing.list_jobs
    return partial(query, state=state, model=model, tenant=tenant, limit=limit, after=end)


def list_dead(model: str | None, limit: int, after: JobId | None) -> Question[Summaries]:
    """Read one page of dead letters. Raises Invalid."""
    end = None if after is None else as_id(after, "after")
    return partial(listing.list_dead, model=model, limit=limit, after=end)


def get_dead(job_id: JobId) -> Question[DeadLetter]:
    """Read a dead letter. Raises NotFound, Invalid."""
    return partial(dead_letters.get_dead, job_id=as_id(job_id))


def replay(job_id: JobId, idempotency_key: str | None) -> Question[UUID]:
    """Store a dead letter as a new job. Raises NotFound, Invalid, Conflict."""
    return partial(dead_letters.replay, job_id=as_id(job_id), idempotency_key=idempotency_key)


def cancel(ids: JobId | Iterable[JobId], tenant: str | None = None) -> Question[States]:
    """Ask for the end of jobs, of one tenant or of all."""
    return partial(jobs.request_cancel, ids=one_or_many(ids), tenant=tenant)


def act_on(act: Act, where: AnyFilter, priority: int | None = None) -> BulkAct:
    """An act on all jobs that match, of the filter's tenant or of all. Raises Invalid."""
    return bulk_act(act, parse_filter(where), priority=priority)


def count_of(act: BulkAct) -> Question[int]:
    """Count the jobs that the act would change."""
    return partial(bulk_acts.count, act=act)


def next_page(act: BulkAct, progress: BulkProgress) -> Question[BulkProgress]:
    """Do the act on a page of jobs. Raises Invalid, Overload."""
    return partial(bulk_acts.next_page, act=act, progress=progress)


def check_exist(ids: Sequence[UUID]) -> Question[None]:
    """Check that jobs exist before a wait. Raises NotFound, naming one that does not."""

    def check(connection: Connection) -> None:
        if missing := set(ids) - states(connection, ids).keys():
            raise NotFound(f"no job has the id {min(missing)}")

    return check


def ended(ids: Sequence[UUID]) -> Question[Ids]:
    """Find those that have ended, or were deleted."""
    return lambda connection: [one for some in _chunks(ids) for one in jobs.ended(connection, some)]


def outcomes(ids: Sequence[UUID], *, must_succeed: bool) -> Question[Jobs]:
    """Read jobs that have ended. Raises NotFound for one that was deleted meanwhile, and with
    `must_succeed` the end of one that did not succeed."""

    def read(connection: Connection) -> Jobs:
        found = {job.id: job for job in _jobs(connection, ids)}
        ended = [existing(found.get(job_id), job_id) for job_id in ids]
        return [succeeded(job) for job in ended] if must_succeed else ended

    return read


def _jobs(connection: Connection, ids: Sequence[UUID]) -> Jobs:
    return [job for some in _chunks(ids) for job in jobs.get_jobs(connection, some)]


def _chunks(ids: Sequence[UUID]) -> Iterator[Sequence[UUID]]:
    for start in range(0, len(ids), MAX_IDS_PER_QUERY):
        yield ids[start : start + MAX_IDS_PER_QUERY]
