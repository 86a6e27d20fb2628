"""The client for asyncio: one object for a whole service, safe for any number of tasks of one event
loop at a time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Literal, Self, Unpack, overload
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from shardline.base.errors import Invalid
from shardline.client import questions
from shardline.client.base_client import BaseClient
from shardline.client.database import check_driver, reachable
from shardline.client.decisions import AnyQuestion, Input, decisions_of, question_requests
from shardline.client.fields import JobFields
from shardline.client.job_reader import JobReader
from shardline.client.partial_inserts import Outcomes, insert_some, skips
from shardline.client.query_batcher import QueryBatcher
from shardline.client.questions import (
    Answer,
    Decisions,
    Ids,
    Jobs,
    Question,
    Scores,
    Summaries,
    Vectors,
)
from shardline.client.requests import AnyRequest, checked, request_of, succeeded
from shardline.client.vectors import (
    AnyText,
    pair_requests,
    scores_of,
    text_requests,
    vectors_of,
)
from shardline.contract.ids import JobId, as_id, is_one, one_or_many
from shardline.contract.job import Job, JobState
from shardline.contract.job_filter import AnyFilter
from shardline.contract.wire import Delta
from shardline.store.bulk_acts import Act, BulkAct, BulkProgress
from shardline.store.connection.database import connect_async
from shardline.store.dead_letters import DeadLetter
from shardline.store.listing import PageEnd

LISTS = 2
"""Lists read at a time."""

LIST_TIMEOUT_S = 10.0

MAX_ROWS = 8
"""Whole jobs that one query reads: each may have megabytes."""


class AsyncClient(BaseClient[AsyncEngine]):
    """`async with AsyncClient() as client:`; addresses come from the environment (SHARDLINE_*)
    where not given.

    A job is accepted when `submit` returns, or, with `session=`, when the caller's transaction
    commits. An event loop that has ended, or a process that was forked, leaves nothing behind: the
    next one gets new connections.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
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
        return (await self._ask(questions.insert([request]), session))[0]

    @overload
    async def submit_many(
        self,
        requests: Iterable[AnyRequest],
        *,
        n: int = 1,
        on_error: Literal["raise"] = "raise",
        session: AsyncSession | AsyncConnection | None = None,
    ) -> Ids: ...

    @overload
    async def submit_many(
        self,
        requests: Iterable[AnyRequest],
        *,
        n: int = 1,
        on_error: Literal["skip"],
        session: AsyncSession | AsyncConnection | None = None,
    ) -> Outcomes: ...

    async def submit_many(
        self,
        requests: Iterable[AnyRequest],
        *,
        n: int = 1,
        on_error: Literal["raise", "skip"] = "raise",
        session: AsyncSession | AsyncConnection | None = None,
    ) -> Ids | Outcomes:
        """Store all of them in one transaction, or none; ids in the same order. Each request has
        `n` choices, with adjacent ids. With `on_error="skip"` what can be stored is,
        and of each other request its error stands in place of an id.

        A type checker knows the fields of `JobRequest(model=…, …)`, not those of a mapping.
        """
        if skips(on_error):
            return await self._ask(insert_some(requests, self.tenant, n), session)
        return await self._ask(questions.insert(checked(requests, self.tenant), n), session)

    async def decide(
        self,
        model: str,
        about: Input,
        questions: Iterable[AnyQuestion],
        *,
        timeout_s: float | None = None,
        **fields: Unpack[JobFields],
    ) -> Decisions:
        """Ask questions about one input, each as a job; their answers, in order. Raises as
        `submit_many` and `wait` do."""
        asked = question_requests(model, about, questions, fields, self.tenant)
        ids = await self.submit_many(asked)
        return decisions_of(await self.wait(ids, timeout_s))

    async def embed(
        self,
        model: str,
        texts: Iterable[AnyText],
        *,
        timeout_s: float | None = None,
        **fields: Unpack[JobFields],
    ) -> Vectors:
        """Turn texts, or their token ids, into vectors, each as a job; in order. Raises as
        `submit_many` and `wait` do."""
        ids = await self.submit_many(text_requests(model, texts, fields, self.tenant))
        return vectors_of(await self.wait(ids, timeout_s))

    async def score(
        self,
        model: str,
        query: str,
        documents: Iterable[str],
        *,
        timeout_s: float | None = None,
        **fields: Unpack[JobFields],
    ) -> Scores:
        """Score documents by a query, each as a job; in order. Raises as `submit_many` and `wait`
        do."""
        ids = await self.submit_many(pair_requests(model, query, documents, fields, self.tenant))
        return scores_of(await self.wait(ids, timeout_s))

    async def get(self, job_id: JobId) -> Job:
        """The job, with its result if it has one. Raises NotFound."""
        wanted = as_id(job_id)
        self._move_here()
        return questions.existing(await self._rows.read(wanted), wanted)

    async def get_many(self, ids: Iterable[JobId]) -> Jobs:
        """Those that exist, in the order of `ids`."""
        return await self._ask(questions.get_many(ids))

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
        return await self._ask(questions.list_jobs(state, model, limit, after), pool=self._lists)

    async def list_dead(
        self, *, model: str | None = None, limit: int = 100, after: JobId | None = None
    ) -> Summaries:
        """Dead letters: jobs that failed because their crashes were used up. The newest first, in
        pages as `list`."""
        return await self._ask(questions.list_dead(model, limit, after), pool=self._lists)

    async def get_dead(self, job_id: JobId) -> DeadLetter:
        """A dead letter with its attempts. Raises NotFound, and Invalid for a job that is none."""
        return await self._ask(questions.get_dead(job_id))

    async def replay(self, job_id: JobId, *, idempotency_key: str | None = None) -> UUID:
        """Submit a dead letter as a new job: same prompt, parameters and seed. Raises NotFound,
        Invalid, Conflict."""
        return await self._ask(questions.replay(job_id, idempotency_key))

    async def cancel(self, ids: JobId | Iterable[JobId]) -> dict[UUID, JobState]:
        """Ask for the end of jobs. Their states afterwards: a running one is `cancelled` a little
        later."""
        return await self._ask(questions.cancel(ids))

    async def cancel_where(self, where: AnyFilter, *, dry_run: bool = False) -> int:
        """Ask for the end of all jobs that match. Returns how many there were, or would be. The
        filter's tenant is its field `tenant`; without it jobs of all tenants are meant."""
        return await self._act(questions.act_on(Act.CANCEL, where), dry_run)

    async def retry_where(self, where: AnyFilter, *, dry_run: bool = False) -> int:
        """Submit all jobs that match again, which failed or are in the filter's state, as `replay`
        does; each once. Returns how many."""
        return await self._act(questions.act_on(Act.RETRY, where), dry_run)

    async def prioritize_where(
        self, where: AnyFilter, priority: int, *, dry_run: bool = False
    ) -> int:
        """Give all queued jobs that match this priority. Returns how many had another."""
        return await self._act(questions.act_on(Act.PRIORITIZE, where, priority), dry_run)

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
            await self._ask(questions.check_exist(wanted))
            await asyncio.gather(*(self._reader.until_ended(job_id) for job_id in set(wanted)))
        found = await self._ask(questions.outcomes(wanted, must_succeed=must_succeed))
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
                if delta.state not in (None, JobState.SUCCEEDED):
                    succeeded(await self.get(wanted), delta.state)

    def _open(self, url: str, database: AsyncEngine | None) -> None:
        self._database = database or connect_async(url)
        # Apart, so that a caller who lists repeatedly takes no connection from those who submit.
        patience = {"pool_size": LISTS, "statement_timeout_s": LIST_TIMEOUT_S}
        self._lists = database or connect_async(url, **patience)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._make_readers()

    def _make_readers(self) -> None:
        """What has tasks and bells, which belong to one event loop; both begin with their first
        question."""
        self._rows = QueryBatcher(self._database, questions.rows, max_batch=MAX_ROWS, name="jobs")
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

    async def _act(self, act: BulkAct, dry_run: bool) -> int:
        """Page by page, each in a transaction: what was done stays, if a later one fails."""
        if dry_run:
            return await self._ask(questions.count_of(act))
        progress = BulkProgress()
        while progress.has_more:
            progress = await self._ask(questions.next_page(act, progress))
        return progress.num_changed

    async def _ask(
        self,
        question: Question[Answer],
        session: AsyncSession | AsyncConnection | None = None,
        *,
        pool: AsyncEngine | None = None,
    ) -> Answer:
        """Asks in a separate transaction, or in the caller's."""
        if session is not None:
            if not isinstance(session, AsyncConnection):
                session = await session.connection()
            check_driver(session.dialect)
            return await session.run_sync(question)
        self._move_here()
        with reachable():
            async with (pool or self._database).begin() as connection:
                return await connection.run_sync(question)
