"""The client for asyncio: one object for a whole service, safe for any number of tasks of one event
loop at a time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar, Unpack, overload
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from shardline.base.errors import Invalid, NotFound
from shardline.client.database import MAX_IDS_PER_QUERY, reachable
from shardline.client.fields import JobFields
from shardline.client.job_reader import JobReader
from shardline.client.query_batcher import QueryBatcher
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
from shardline.store.connection.database import connect_async
from shardline.store.dead_letters import DeadLetter
from shardline.store.listing import PageEnd

LISTS = 2
"""Lists read at a time."""

LIST_TIMEOUT_S = 10.0

MAX_ROWS = 8
"""Whole jobs that one query reads: each may have megabytes."""

# Names for annotations: inside the classes `list` is the method.
Ids = list[UUID]
Jobs = list[Job]
Summaries = list[JobSummary]

Answer = TypeVar("Answer")
Parameters = ParamSpec("Parameters")


class AsyncClient:
    """`async with AsyncClient() as client:`; addresses come from the environment (SHARDLINE_*)
    where not given.

    A job is accepted when `submit` returns, or, with `session=`, when the caller's transaction
    commits. An event loop that has ended, or a process that was forked, leaves nothing behind: the
    next one gets new connections.
    """

    def __init__(
        self,
        *,
        database_url: str | None = None,
        redis_url: str | None = None,
        tenant: str = "default",
        database: AsyncEngine | None = None,
    ) -> None:
        self._settings = settings_with(database_url=database_url, redis_url=redis_url)
        url = self._settings.database_url.get_secret_value()
        self.tenant = tenant
        self._database = database or connect_async(url)
        self._owns_database = database is None
        # Apart, so that a caller who lists repeatedly takes no connection from those who submit.
        self._lists = database or connect_async(
            url, pool_size=LISTS, statement_timeout_s=LIST_TIMEOUT_S
        )
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._make_readers()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the tasks and give back the connections. Jobs go on."""
        self._move_here()
        await self._reader.close()
        await self._rows.close()
        if self._owns_database:
            await self._database.dispose()
            await self._lists.dispose()

    async def submit(
        self,
        model: str,
        prompt: str | Sequence[int] | None = None,
        *,
        session: AsyncSession | AsyncConnection | None = None,
        **fields: Unpack[JobFields],
    ) -> UUID:
        """Store one job and return its id. `fields` are in docs/jobs.md. Raises Invalid, Conflict,
        Unavailable."""
        request = request_of(model, prompt, fields, self.tenant)
        return (await self._insert([request], session))[0].job_id

    async def submit_many(
        self,
        requests: Iterable[AnyRequest],
        *,
        session: AsyncSession | AsyncConnection | None = None,
    ) -> Ids:
        """Store all of them in one transaction, or none; ids in the same order.

        A type checker knows the fields of `JobRequest(model=…, …)`, not those of a mapping.
        """
        return [one.job_id for one in await self._insert(checked(requests, self.tenant), session)]

    async def get(self, job_id: JobId) -> Job:
        """The job, with its result if it has one. Raises NotFound."""
        wanted = as_id(job_id)
        self._move_here()
        with reachable():
            job = await self._rows.read(wanted)
        if job is None:
            raise NotFound(f"no job has the id {wanted}")
        return job

    async def get_many(self, ids: Iterable[JobId]) -> Jobs:
        """Those that exist, in the order of `ids`."""
        wanted = as_ids(ids)
        chunks = (
            wanted[start : start + MAX_IDS_PER_QUERY]
            for start in range(0, len(wanted), MAX_IDS_PER_QUERY)
        )
        return [job for chunk in chunks for job in await self._read(jobs.get_jobs, chunk)]

    async def list(
        self,
        *,
        state: JobState | None = None,
        model: str | None = None,
        limit: int = 100,
        after: JobId | PageEnd | None = None,
    ) -> Summaries:
        """Newest first, without prompts and completions; `after` is `PageEnd.of` the page before,
        or its last id."""
        return await self._read_page(
            listing.list_jobs, state=state, model=model, limit=limit, after=end_of(after)
        )

    async def list_dead(
        self, *, model: str | None = None, limit: int = 100, after: JobId | None = None
    ) -> Summaries:
        """Dead letters: jobs that failed because their crashes were used up. The newest first, in
        pages as `list`."""
        last = None if after is None else as_id(after, "after")
        return await self._read_page(listing.list_dead, model=model, limit=limit, after=last)

    async def get_dead(self, job_id: JobId) -> DeadLetter:
        """A dead letter with its attempts. Raises NotFound, and Invalid for a job that is none."""
        return await self._read(dead_letters.get_dead, as_id(job_id))

    async def replay(self, job_id: JobId, *, idempotency_key: str | None = None) -> UUID:
        """Submit a dead letter as a new job: same prompt, parameters and seed. Raises NotFound,
        Invalid, Conflict."""
        return await self._write(
            dead_letters.replay, as_id(job_id), idempotency_key=idempotency_key
        )

    async def cancel(self, ids: JobId | Iterable[JobId]) -> dict[UUID, JobState]:
        """Ask for the end of jobs. Their states afterwards: a running one is `cancelled` a little
        later."""
        return await self._write(jobs.request_cancel, one_or_many(ids))

    @overload
    async def wait(  # type: ignore[overload-overlap] # a text is iterable too: it is one id
        self, ids: JobId, timeout_s: float | None = None, *, must_succeed: bool = True
    ) -> Job: ...

    @overload
    async def wait(
        self, ids: Iterable[JobId], timeout_s: float | None = None, *, must_succeed: bool = True
    ) -> Jobs: ...

    async def wait(
        self,
        ids: JobId | Iterable[JobId],
        timeout_s: float | None = None,
        *,
        must_succeed: bool = True,
    ) -> Job | Jobs:
        """Until all have ended. Raises TimeoutError, NotFound, and for a job that did not succeed
        its end, unless `must_succeed` is False."""
        wanted = one_or_many(ids)
        async with asyncio.timeout(timeout_s):
            check_all_exist(wanted, await self.get_many(wanted))
            await asyncio.gather(*(self._reader.until_ended(job_id) for job_id in set(wanted)))
        found = await self.get_many(wanted)
        if must_succeed:
            found = [succeeded(job) for job in found]
        return found[0] if is_one(ids) else found

    async def stream(self, job_id: JobId) -> AsyncIterator[Delta]:
        """The job's new tokens as they come, each once, the last with its state. Raises as `wait`
        does at the end, and Diverged when the job goes on with other tokens than were given.

        Text of tokens that did not come through Redis is in the last delta.
        """
        wanted = as_id(job_id)
        self._move_here()
        async for deltas in self._reader.follow(wanted):
            for delta in deltas:
                yield delta
                if delta.state is not None and delta.state != JobState.SUCCEEDED:
                    raise error_of(
                        JobState(delta.state), f"job {wanted}", (await self.get(wanted)).error
                    )

    def _make_readers(self) -> None:
        """What has tasks and bells, which belong to one event loop; both begin with their first
        question."""
        self._rows = QueryBatcher(self._database, _rows, max_batch=MAX_ROWS, name="jobs")
        self._reader = JobReader(self._database, self._settings)

    def _move_here(self) -> None:
        """Moves to the running event loop of this process, which may be another one than the last
        time. Raises Invalid."""
        loop = asyncio.get_running_loop()
        pid = os.getpid()
        was = self._loop
        if was is loop and self._pid == pid:
            return
        if was is not None:
            if was.is_running() and self._pid == pid:
                raise Invalid(
                    "client",
                    "another event loop uses it",
                    "Make one AsyncClient for each event loop",
                )
            if self._owns_database:
                # Not closed: an event loop that has ended cannot, and a forked process would end
                # its parent's sessions.
                self._database.sync_engine.dispose(close=False)
                self._lists.sync_engine.dispose(close=False)
            self._make_readers()
        self._loop = loop
        self._pid = pid

    async def _insert(
        self, requests: Sequence[JobRequest], session: AsyncSession | AsyncConnection | None
    ) -> Sequence[jobs.StoredRequest]:
        if session is None:
            return await self._write(jobs.insert_jobs, requests)
        connection = session if isinstance(session, AsyncConnection) else await session.connection()
        return await connection.run_sync(jobs.insert_jobs, requests)

    async def _read(
        self,
        query: Callable[Concatenate[Connection, Parameters], Answer],
        *arguments: Parameters.args,
        **options: Parameters.kwargs,
    ) -> Answer:
        self._move_here()
        with reachable():
            async with self._database.connect() as connection:
                return await connection.run_sync(query, *arguments, **options)

    async def _read_page(
        self,
        query: Callable[Concatenate[Connection, Parameters], Answer],
        *arguments: Parameters.args,
        **options: Parameters.kwargs,
    ) -> Answer:
        self._move_here()
        with reachable():
            async with self._lists.connect() as connection:
                return await connection.run_sync(query, *arguments, **options)

    async def _write(
        self,
        statement: Callable[Concatenate[Connection, Parameters], Answer],
        *arguments: Parameters.args,
        **options: Parameters.kwargs,
    ) -> Answer:
        self._move_here()
        with reachable():
            async with self._database.begin() as connection:
                return await connection.run_sync(statement, *arguments, **options)


def _rows(connection: Connection, ids: Sequence[UUID]) -> list[Job | None]:
    found = {job.id: job for job in jobs.get_jobs(connection, list(set(ids)))}
    return [found.get(job_id) for job_id in ids]
