"""The client for asyncio: one object for a whole service, safe for any number of tasks of one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, overload
from uuid import UUID

import structlog
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from shardline.client.database import AWAY, MAX_IDS_PER_QUERY, listen_address, reachable, told
from shardline.client.ends import Ends
from shardline.client.progress import TextRule
from shardline.client.requests import (
    AnyRequest,
    check_all_exist,
    checked,
    error_of,
    request_of,
    settings_with,
    succeeded,
)
from shardline.client.together import Together
from shardline.errors import NotFound
from shardline.job import Job, JobRequest, JobState, JobSummary
from shardline.store import dead_letters, jobs, listing
from shardline.store.database import connect_async
from shardline.store.dead_letters import DeadLetter
from shardline.store.inserts import Tokenised
from shardline.store.listing import PageEnd
from shardline.store.progress import Asked, read_progress
from shardline.streams import Cursor, DeltaReader, Mailbox, Place
from shardline.wire import Delta

log = structlog.get_logger(__name__)

LISTS = 2
"""Lists read at a time."""

LIST_TIMEOUT_S = 10.0

MAX_FOLLOWED = 64
"""Followed jobs whose new tokens one query reads."""

MAX_ROWS = 8
"""Whole jobs that one query reads: each may have megabytes."""

# Names for annotations: inside the classes `list` is the method.
Ids = list[UUID]
Jobs = list[Job]
Summaries = list[JobSummary]
Deltas = list[Delta]
Stored = list[jobs.Stored]

MAX_SAID_AT_ONCE = 256
"""Tokens turned to text between two looks at other tasks; more go to a thread."""


class AsyncClient:
    """`async with AsyncClient() as client:`; addresses come from the environment (SHARDLINE_*) where not given.

    A job is accepted when `submit` returns, or, with `session=`, when the caller's transaction commits.
    """

    def __init__(
        self,
        *,
        database_url: str | None = None,
        redis_url: str | None = None,
        tenant: str = "default",
        database: AsyncEngine | None = None,
    ) -> None:
        settings = settings_with(database_url=database_url, redis_url=redis_url)
        self.tenant = tenant
        self.database = database or connect_async(settings.database_url.get_secret_value())
        self._owns_database = database is None
        # Apart, so that whoever lists, and lists again, takes no connection from those who submit.
        self._lists = database or connect_async(
            settings.database_url.get_secret_value(), pool_size=LISTS, statement_timeout_s=LIST_TIMEOUT_S
        )
        self._poll_s = settings.times.poll_s
        self._reader = DeltaReader(settings.redis_url)
        address = self.database.url if database is not None else settings.database_url.get_secret_value()
        self._ends = Ends(self.database, listen_address(address), poll_s=self._poll_s)
        self._progress = Together(self.database, read_progress, max_batch=MAX_FOLLOWED, name="progress")
        self._rows = Together(self.database, _rows, max_batch=MAX_ROWS, name="jobs")
        self._started = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the tasks and give back the connections. Jobs go on."""
        if self._started:
            await self._ends.close()
        await self._progress.close()
        await self._rows.close()
        await self._reader.close()
        if self._owns_database:
            await self.database.dispose()
            await self._lists.dispose()

    async def submit(
        self,
        model: str,
        prompt: str | Sequence[int] | None = None,
        *,
        session: AsyncSession | AsyncConnection | None = None,
        **fields: Any,
    ) -> UUID:
        """Store one job and return its id. `fields` are in docs/jobs.md. Raises Invalid, Conflict, Unavailable."""
        request = request_of(model, prompt, fields, self.tenant)
        return (await self.insert([request], session=session))[0].job_id

    async def submit_many(
        self, requests: Iterable[AnyRequest], *, session: AsyncSession | AsyncConnection | None = None
    ) -> Ids:
        """Store all of them in one transaction, or none; ids in the same order."""
        return [one.job_id for one in await self.insert(checked(requests, self.tenant), session=session)]

    async def insert(
        self,
        requests: Sequence[JobRequest],
        *,
        prepared: Sequence[Tokenised | None] | None = None,
        session: AsyncSession | AsyncConnection | None = None,
    ) -> Stored:
        """Like `submit_many`, for a door that has checked and perhaps tokenised the requests, and wants to know which
        of them are new."""
        if session is not None:
            connection = session if isinstance(session, AsyncConnection) else await session.connection()
            return await connection.run_sync(jobs.insert_jobs, requests, prepared=prepared)
        with reachable():
            async with self.database.begin() as connection:
                return await connection.run_sync(jobs.insert_jobs, requests, prepared=prepared)

    async def get(self, job_id: UUID, *, tenant: str | None = None) -> Job:
        """The job, with its result if it has one. Raises NotFound, with `tenant` also for another tenant's."""
        with reachable():
            job = await self._rows.read(job_id)
        if job is None or tenant not in (None, job.tenant):
            raise NotFound(f"no job has the id {job_id}")
        return job

    async def get_many(self, ids: Sequence[UUID], *, tenant: str | None = None) -> Jobs:
        """Those that exist, of one tenant or of all, in the order of `ids`."""
        found: Jobs = []
        with reachable():
            async with self.database.connect() as connection:
                for start in range(0, len(ids), MAX_IDS_PER_QUERY):
                    some = ids[start : start + MAX_IDS_PER_QUERY]
                    found += await connection.run_sync(jobs.get_jobs, some, tenant=tenant)
        return found

    async def list(
        self,
        *,
        state: JobState | None = None,
        model: str | None = None,
        tenant: str | None = None,
        limit: int = 100,
        after: UUID | PageEnd | None = None,
    ) -> Summaries:
        """Newest first, of one tenant or of all, without prompts and completions; `after` is `PageEnd.of` the page
        before, or its last id."""
        with reachable():
            async with self._lists.connect() as connection:
                return await connection.run_sync(
                    listing.list_jobs, state=state, model=model, tenant=tenant, limit=limit, after=after
                )

    async def list_dead(self, *, model: str | None = None, limit: int = 100, after: UUID | None = None) -> Summaries:
        """Dead letters: jobs that failed because their crashes were used up. The newest first, in pages as `list`."""
        with reachable():
            async with self._lists.connect() as connection:
                return await connection.run_sync(listing.list_dead, model=model, limit=limit, after=after)

    async def get_dead(self, job_id: UUID) -> DeadLetter:
        """A dead letter with its attempts. Raises NotFound, and Invalid for a job that is none."""
        with reachable():
            async with self.database.connect() as connection:
                return await connection.run_sync(dead_letters.get_dead, job_id)

    async def replay(self, job_id: UUID, *, idempotency_key: str | None = None) -> UUID:
        """Submit a dead letter as a new job: same prompt, parameters and seed. Raises NotFound, Invalid, Conflict."""
        with reachable():
            async with self.database.begin() as connection:
                return await connection.run_sync(dead_letters.replay, job_id, idempotency_key=idempotency_key)

    async def cancel(self, ids: UUID | Collection[UUID], *, tenant: str | None = None) -> dict[UUID, JobState]:
        """Ask for the end of jobs. Their states afterwards: a running one is `cancelled` a little later."""
        wanted = [ids] if isinstance(ids, UUID) else list(ids)
        with reachable():
            async with self.database.begin() as connection:
                return await connection.run_sync(jobs.request_cancel, wanted, tenant=tenant)

    @overload
    async def wait(self, ids: UUID, timeout_s: float | None = None, *, must_succeed: bool = True) -> Job: ...

    @overload
    async def wait(
        self, ids: Collection[UUID], timeout_s: float | None = None, *, must_succeed: bool = True
    ) -> Jobs: ...

    async def wait(
        self, ids: UUID | Collection[UUID], timeout_s: float | None = None, *, must_succeed: bool = True
    ) -> Job | Jobs:
        """Until all have ended. Raises TimeoutError, NotFound, and for a job that did not succeed its end,
        unless `must_succeed` is False."""
        self._start()
        wanted = [ids] if isinstance(ids, UUID) else list(ids)
        async with asyncio.timeout(timeout_s):
            check_all_exist(wanted, await self.get_many(wanted))
            await asyncio.gather(*(self._until_ended(job_id) for job_id in set(wanted)))
        found = await self.get_many(wanted)
        if must_succeed:
            found = [succeeded(job) for job in found]
        return found[0] if isinstance(ids, UUID) else found

    async def until_ended(self, job_id: UUID) -> Job:
        """Like `wait` for a job that is known to exist and may end in any way."""
        self._start()
        await self._until_ended(job_id)
        return await self.get(job_id)

    async def stream(self, job_id: UUID) -> AsyncIterator[Delta]:
        """The job's new tokens as they come, each once, the last with its state. Raises as `wait` does at the end, and
        Diverged when the job goes on with other tokens than were given.

        Text of tokens that did not come through Redis is in the last delta.
        """
        async for deltas in self.follow(job_id):
            for delta in deltas:
                yield delta
                if delta.state is not None and delta.state != JobState.SUCCEEDED:
                    raise error_of(JobState(delta.state), f"job {job_id}", (await self.get(job_id)).error)

    async def follow(
        self,
        job_id: UUID,
        *,
        after: Place | None = None,
        text_rule: TextRule | None = None,
        tick_s: float | None = None,
    ) -> AsyncIterator[Deltas]:
        """What `stream` is made of: joins `after` so many tokens, yields an empty list at every tick without news.

        With `text_rule` the text of tokens read from Postgres comes at once. Ends after the delta that has a state.
        """
        self._start()
        cursor, mailbox = Cursor(after=after), Mailbox()
        wait_s = min(self._poll_s, tick_s or self._poll_s)
        with self._ends.watch(job_id, mailbox), self._reader.watch(job_id, mailbox):
            # First of all the newest attempt's number: its predecessors may have streamed what counts no more.
            only_learn = text_rule is None and after is None and not self._reader.is_away
            await self._catch_up(job_id, cursor, text_rule, only_learn=only_learn)
            while True:
                yield cursor.take()
                if cursor.ended:
                    return
                for delta in await mailbox.wait(wait_s):
                    cursor.push(delta)
                if mailbox.ended or cursor.has_gap or self._reader.is_away:
                    await self._catch_up(job_id, cursor, text_rule)

    async def _catch_up(
        self, job_id: UUID, cursor: Cursor, text_rule: TextRule | None, *, only_learn: bool = False
    ) -> None:
        """All pages. While Postgres is away too, the stream alone must do."""
        is_whole = False
        while not is_whole:
            try:
                progress = await self._progress.read(Asked(job_id, *cursor.asked(only_learn=only_learn)))
            except (DBAPIError, *AWAY) as error:
                log.warning("a stream waits for its rows", job_id=str(job_id), error=told(error))
                return
            if progress is None:
                raise NotFound(f"no job has the id {job_id}")
            if text_rule is not None and cursor.text_of is None and progress.max_tokens is not None:
                cursor.text_of = text_rule(progress.params, progress.max_tokens)
            num_said = 0 if cursor.text_of is None else cursor.num_unsaid + len(progress.token_ids)
            if num_said > MAX_SAID_AT_ONCE:
                await asyncio.to_thread(cursor.catch_up, progress, only_learn=only_learn)
            else:
                cursor.catch_up(progress, only_learn=only_learn)
            is_whole = progress.is_whole and (progress.state is None or cursor.ended)
            only_learn = only_learn and not progress.is_whole

    async def _until_ended(self, job_id: UUID) -> None:
        mailbox = Mailbox()
        with self._ends.watch(job_id, mailbox):
            while not mailbox.ended:
                await mailbox.bell.wait()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._ends.start()
            self._reader.start()


def _rows(connection: Connection, ids: Sequence[UUID]) -> list[Job | None]:
    found = {job.id: job for job in jobs.get_jobs(connection, list(set(ids)))}
    return [found.get(job_id) for job_id in ids]
