"""The client for ordinary threads. Each call takes its connections from one pool, so threads may
share it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar, Unpack, overload
from uuid import UUID

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from shardline.base.errors import NotFound, Unavailable
from shardline.client.database import MAX_IDS_PER_QUERY, connection_of, reachable
from shardline.client.ends_sync import SyncEnds
from shardline.client.fields import JobFields
from shardline.client.requests import (
    AnyRequest,
    check_all_exist,
    checked,
    end_of,
    error_of,
    request_of,
    settings_with,
    succeeded,
)
from shardline.contract.ids import JobId, as_id, as_ids, is_one, one_or_many
from shardline.contract.job import Job, JobRequest, JobState, JobSummary
from shardline.contract.wire import Delta
from shardline.store import dead_letters, jobs, listing
from shardline.store.connection.database import connect
from shardline.store.dead_letters import DeadLetter
from shardline.store.listing import PageEnd
from shardline.store.progress import ProgressQuestion, read_progress
from shardline.streams import Cursor, SyncDeltaReader

RETRY_S = 0.2

# Names for annotations: inside the classes `list` is the method.
Ids = list[UUID]
Jobs = list[Job]
Summaries = list[JobSummary]

Answer = TypeVar("Answer")
Parameters = ParamSpec("Parameters")


class Client:
    """`with Client() as client:`; addresses come from the environment (SHARDLINE_*) where not
    given.

    A job is accepted when `submit` returns, or, with `session=`, when the caller's transaction
    commits. A process that was forked gets new connections; those of its parent stay as they are.
    """

    def __init__(
        self,
        *,
        database_url: str | None = None,
        redis_url: str | None = None,
        tenant: str = "default",
        database: Engine | None = None,
    ) -> None:
        settings = settings_with(database_url=database_url, redis_url=redis_url)
        self.tenant = tenant
        self._database = database or connect(settings.database_url.get_secret_value())
        self._owns_database = database is None
        self._poll_s = settings.times.poll_s
        self._pid = os.getpid()
        self._ends = SyncEnds(self._ended, self._database.url, poll_s=self._poll_s)
        self._redis = SyncDeltaReader.connect(settings.redis_url)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give back the connections. Jobs go on."""
        self._move_here()
        self._redis.close()
        if self._owns_database:
            self._database.dispose()

    def submit(
        self,
        model: str,
        prompt: str | Sequence[int] | None = None,
        *,
        session: Session | Connection | None = None,
        **fields: Unpack[JobFields],
    ) -> UUID:
        """Store one job and return its id. `fields` are in docs/jobs.md. Raises Invalid, Conflict,
        Unavailable."""
        return self._insert([request_of(model, prompt, fields, self.tenant)], session)[0]

    def submit_many(
        self, requests: Iterable[AnyRequest], *, session: Session | Connection | None = None
    ) -> Ids:
        """Store all of them in one transaction, or none; ids in the same order.

        A type checker knows the fields of `JobRequest(model=…, …)`, not those of a mapping.
        """
        return self._insert(checked(requests, self.tenant), session)

    def get(self, job_id: JobId) -> Job:
        """The job, with its result if it has one. Raises NotFound."""
        wanted = as_id(job_id)
        found = self.get_many([wanted])
        if not found:
            raise NotFound(f"no job has the id {wanted}")
        return found[0]

    def get_many(self, ids: Iterable[JobId]) -> Jobs:
        """Those that exist, in the order of `ids`."""
        return [job for some in _chunks(as_ids(ids)) for job in self._read(jobs.get_jobs, some)]

    def list(
        self,
        *,
        state: JobState | None = None,
        model: str | None = None,
        limit: int = 100,
        after: JobId | PageEnd | None = None,
    ) -> Summaries:
        """Newest first, without prompts and completions; `after` is `PageEnd.of` the page before,
        or its last id."""
        return self._read(
            listing.list_jobs, state=state, model=model, limit=limit, after=end_of(after)
        )

    def list_dead(
        self, *, model: str | None = None, limit: int = 100, after: JobId | None = None
    ) -> Summaries:
        """Dead letters: jobs that failed because their crashes were used up. The newest first, in
        pages as `list`."""
        last = None if after is None else as_id(after, "after")
        return self._read(listing.list_dead, model=model, limit=limit, after=last)

    def get_dead(self, job_id: JobId) -> DeadLetter:
        """A dead letter with its attempts. Raises NotFound, and Invalid for a job that is none."""
        return self._read(dead_letters.get_dead, as_id(job_id))

    def replay(self, job_id: JobId, *, idempotency_key: str | None = None) -> UUID:
        """Submit a dead letter as a new job: same prompt, parameters and seed. Raises NotFound,
        Invalid, Conflict."""
        return self._write(dead_letters.replay, as_id(job_id), idempotency_key=idempotency_key)

    def cancel(self, ids: JobId | Iterable[JobId]) -> dict[UUID, JobState]:
        """Ask for the end of jobs. Their states afterwards: a running one is `cancelled` a little
        later."""
        return self._write(jobs.request_cancel, one_or_many(ids))

    @overload
    def wait(  # type: ignore[overload-overlap] # a text is iterable too: it is one id
        self, ids: JobId, timeout_s: float | None = None, *, must_succeed: bool = True
    ) -> Job: ...

    @overload
    def wait(
        self, ids: Iterable[JobId], timeout_s: float | None = None, *, must_succeed: bool = True
    ) -> Jobs: ...

    def wait(
        self,
        ids: JobId | Iterable[JobId],
        timeout_s: float | None = None,
        *,
        must_succeed: bool = True,
    ) -> Job | Jobs:
        """Until all have ended. Raises TimeoutError, NotFound, and for a job that did not succeed
        its end, unless `must_succeed` is False."""
        wanted = one_or_many(ids)
        check_all_exist(wanted, self.get_many(wanted))
        self._ends.wait(wanted, timeout_s)
        found = self.get_many(wanted)
        if must_succeed:
            found = [succeeded(job) for job in found]
        return found[0] if is_one(ids) else found

    def stream(self, job_id: JobId) -> Iterator[Delta]:
        """The job's new tokens as they come, each once, the last with its state. Raises as `wait`
        does at the end, and Diverged when the job goes on with other tokens than were given.

        Text of tokens that did not come through Redis is in the last delta.
        """
        wanted = as_id(job_id)
        cursor = Cursor()
        reader = SyncDeltaReader(self._redis, wanted)
        # First of all the newest attempt's number: its predecessors may have streamed what counts
        # no more.
        self._catch_up(wanted, cursor, only_learn=True)
        while True:
            for delta in cursor.take():
                yield delta
                if delta.state is not None and delta.state != JobState.SUCCEEDED:
                    raise error_of(JobState(delta.state), f"job {wanted}", self.get(wanted).error)
            if cursor.ended:
                return
            deltas = reader.read(self._poll_s)
            for delta in deltas:
                cursor.push(delta)
            if not deltas or cursor.has_gap:
                self._catch_up(wanted, cursor, only_learn=not (reader.is_away or cursor.has_gap))
            if reader.is_away:
                time.sleep(min(RETRY_S, self._poll_s))

    def _catch_up(self, job_id: UUID, cursor: Cursor, *, only_learn: bool) -> None:
        """All pages. While the stream is whole it is ahead of Postgres, which then knows nothing
        but the end."""
        is_whole = False
        while not is_whole:
            try:
                (progress,) = self._read(
                    read_progress, [ProgressQuestion(job_id, *cursor.asked(only_learn=only_learn))]
                )
            except Unavailable:
                return
            if progress is None:
                raise NotFound(f"no job has the id {job_id}")
            cursor.catch_up(progress, only_learn=only_learn)
            is_whole = progress.is_whole and (progress.state is None or cursor.ended)
            only_learn = only_learn and not progress.is_whole

    def _ended(self, ids: Sequence[UUID]) -> Ids:
        return [job_id for some in _chunks(ids) for job_id in self._read(jobs.ended, some)]

    def _insert(self, requests: Sequence[JobRequest], session: Session | Connection | None) -> Ids:
        if session is not None:
            stored = jobs.insert_jobs(connection_of(session), requests)
        else:
            stored = self._write(jobs.insert_jobs, requests)
        return [one.job_id for one in stored]

    def _read(
        self,
        query: Callable[Concatenate[Connection, Parameters], Answer],
        *arguments: Parameters.args,
        **options: Parameters.kwargs,
    ) -> Answer:
        self._move_here()
        with reachable(), self._database.connect() as connection:
            return query(connection, *arguments, **options)

    def _write(
        self,
        statement: Callable[Concatenate[Connection, Parameters], Answer],
        *arguments: Parameters.args,
        **options: Parameters.kwargs,
    ) -> Answer:
        self._move_here()
        with reachable(), self._database.begin() as connection:
            return statement(connection, *arguments, **options)

    def _move_here(self) -> None:
        """Moves to this process: after a fork the connections, and the threads that waited, are its
        parent's."""
        if self._pid == os.getpid():
            return
        if self._owns_database:
            self._database.dispose(close=False)
        self._ends = SyncEnds(self._ended, self._database.url, poll_s=self._poll_s)
        self._pid = os.getpid()


def _chunks(ids: Sequence[UUID]) -> Iterator[Sequence[UUID]]:
    for start in range(0, len(ids), MAX_IDS_PER_QUERY):
        yield ids[start : start + MAX_IDS_PER_QUERY]
