"""The client of the gateway: what a door on the network needs beyond a producer. Owns no SQL."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncEngine

from services.gateway.turns import TenantTurns
from shardline.base.errors import ShardlineError
from shardline.client import questions
from shardline.client.asynchronous import LISTS, MAX_ROWS, AsyncClient
from shardline.client.database import reachable
from shardline.client.job_reader import JobReader
from shardline.client.query_batcher import QueryBatcher
from shardline.client.questions import Answer, Question, Summaries
from shardline.contract.ids import JobId
from shardline.contract.job import Job, JobState, Usage
from shardline.store import stored_completions as stored
from shardline.store.audit import acting
from shardline.store.bulk_acts import BulkAct, BulkProgress
from shardline.store.connection.held_connection import HeldConnection
from shardline.store.inserts import EncodedRequest, StoredRequest
from shardline.store.listing import PageEnd
from shardline.store.pipelines import LivePipeline, live_pipelines
from shardline.store.responses import (
    EncodedResponse,
    ReferencedJobs,
    ResponseRow,
    delete_response,
    insert_with_responses,
    read_referenced,
    read_responses,
)
from shardline.store.statistics import costs, reports
from shardline.store.statistics.costs import Cost
from shardline.store.stored_completions import StoredCompletion

Costs = list[Cost]
Pipelines = list[LivePipeline]
StoredPage = tuple[list[StoredCompletion], bool]
"""For annotations: inside the class `list` is the method."""

MAX_PAGES = 10
"""Of jobs that one request changes: it shall not take minutes."""

MAX_ASKING = 4096
"""Callers whom one query for pipelines answers."""


class GatewayClient(AsyncClient):
    """Acts for a tenant: with `tenant`, another tenant's job is as if it did not exist."""

    def __init__(
        self,
        *,
        database_url: str | None = None,
        redis_url: str | None = None,
        database: AsyncEngine | None = None,
    ) -> None:
        super().__init__(database_url=database_url, redis_url=redis_url, database=database)
        # Costs may take seconds, and lists of a rare state too: none may take all connections for
        # lists.
        self._list_turns = TenantTurns(LISTS)
        self._cost_turns = TenantTurns(1)
        self._pipelines = QueryBatcher(
            self._database, _live_pipelines, max_batch=MAX_ASKING, name="pipelines"
        )
        self._responses = QueryBatcher(
            self._database, read_responses, max_batch=MAX_ROWS, name="responses"
        )

    async def close(self) -> None:
        """Closes it, as `AsyncClient.close` does."""
        await self._pipelines.close()
        await self._responses.close()
        await super().close()

    @property
    def database(self) -> AsyncEngine:
        """The pool that submits, reads and cancels."""
        return self._database

    async def ask(self, question: Question[Answer], *, key_id: str | None = None) -> Answer:
        """Asks in a separate transaction, on the pool for submits. The audit log notes changes as
        acts of `key_id`. Raises Unavailable."""
        return await self._ask(question if key_id is None else _acting(key_id, question))

    async def insert(
        self, requests: Sequence[EncodedRequest], *, may_repeat: bool, held: HeldConnection
    ) -> Sequence[StoredRequest | ShardlineError]:
        """Store requests in one transaction; for each its row, or why it has none. Raises Invalid
        for a row against a rule of the table, and Unavailable: then none is stored.

        `may_repeat`: an id or key among them may be there already. Rows that are new, one for each
        request, take one statement on `held`, which needs no BEGIN and no COMMIT.
        """
        question = partial(insert_with_responses, requests=requests)
        if may_repeat or any(
            request.others or isinstance(request, EncodedResponse) for request in requests
        ):
            return await self._ask(question)
        with reachable():
            return await held.ask(question)

    async def get(self, job_id: JobId, *, tenant: str | None = None) -> Job:
        """The job, with its result if it has one. Raises NotFound, with `tenant` also for another
        tenant's."""
        job = await super().get(job_id)
        return questions.existing(job if tenant in (None, job.tenant) else None, job.id)

    async def response(self, job_id: UUID) -> ResponseRow | None:
        """Returns a job's response, of any tenant and stored or not; None where there is none.
        Raises Unavailable."""
        return await self._responses.read(job_id)

    async def referenced(self, wanted: ReferencedJobs, *, tenant: str) -> dict[UUID, ResponseRow]:
        """The stored responses of the tenant among those wanted, with what is wanted of them alone:
        see `read_referenced`. Raises Invalid, Unavailable."""
        return await self._ask(partial(read_referenced, wanted=wanted, tenant=tenant))

    async def delete_response(self, job_id: UUID, *, tenant: str) -> bool:
        """Delete a stored response of the tenant. Returns whether there was one."""
        return await self._ask(partial(delete_response, job_id=job_id, tenant=tenant))

    async def list(
        self,
        *,
        state: JobState | None = None,
        model: str | None = None,
        tenant: str | None = None,
        limit: int = 100,
        after: JobId | PageEnd | None = None,
    ) -> Summaries:
        """Lists as `AsyncClient.list`, of one tenant or of all. Raises Overload when a tenant
        asks for too many at once."""
        async with self._list_turns.take(tenant):
            page = questions.list_jobs(state, model, limit, after, tenant)
            return await self._ask(page, pool=self._lists)

    async def get_stored(self, job_id: UUID, *, tenant: str) -> StoredCompletion:
        """A stored completion. Raises NotFound."""
        return await self._ask(partial(stored.get_stored, job_id=job_id, tenant=tenant))

    async def list_stored(self, *, tenant: str, **asked: Any) -> StoredPage:
        """Returns a page of stored completions, and whether there are more: see
        `stored_completions.list_stored`. Raises Invalid, and Overload as `list` does."""
        async with self._list_turns.take(tenant):
            page = partial(stored.list_stored, tenant=tenant, **asked)
            return await self._ask(page, pool=self._lists)

    async def change_stored(
        self, job_id: UUID, metadata: Mapping[str, Any], *, tenant: str
    ) -> StoredCompletion:
        """Replaces a stored completion's metadata. Raises NotFound."""
        change = partial(stored.change_stored, job_id=job_id, metadata=metadata, tenant=tenant)
        return await self._ask(change)

    async def forget_stored(self, job_id: UUID, *, tenant: str) -> None:
        """Stores a completion no more. Raises NotFound."""
        await self._ask(partial(stored.forget_stored, job_id=job_id, tenant=tenant))

    async def usage(self, job_id: UUID) -> Usage | None:
        """The token counts of a job's result; None without one. Raises Unavailable."""
        return await self._ask(partial(reports.usage, job_id=job_id))

    async def costs(
        self, *, num_days: int, by: Collection[str], model: str | None, tenant: str | None
    ) -> Costs:
        """What jobs took, of one tenant or of all: see `costs.costs`. Raises Overload as `list`
        does."""
        async with self._cost_turns.take(tenant), self._list_turns.take(None):
            asked = partial(costs.costs, num_days=num_days, by=by, model=model, tenant=tenant)
            return await self._ask(asked, pool=self._lists)

    async def pipelines(self) -> Pipelines:
        """Returns all pipelines with a running lease. One query at a time answers all callers."""
        return await self._pipelines.read(None)

    async def cancel(
        self, ids: JobId | Iterable[JobId], *, tenant: str | None = None
    ) -> dict[UUID, JobState]:
        """Cancels as `AsyncClient.cancel`; with `tenant`, another tenant's jobs are left out."""
        return await self._ask(questions.cancel(ids, tenant))

    async def act(self, act: BulkAct, *, dry_run: bool, key_id: str) -> BulkProgress:
        """Acts on at most MAX_PAGES pages of jobs; of a dry run `num_changed` is a count. Raises
        Overload as `list` does, and what a quota refuses."""
        async with self._list_turns.take(act.where.tenant):
            if dry_run:
                number = await self._ask(questions.count_of(act), pool=self._lists)
                return BulkProgress(num_changed=number, has_more=False)
            progress = BulkProgress()
            for _ in range(MAX_PAGES):
                page = _acting(key_id, questions.next_page(act, progress))
                progress = await self._ask(page, pool=self._lists)
                if not progress.has_more:
                    break
            return progress

    async def until_ended(self, job_id: UUID) -> Job:
        """Like `wait` for a job that is known to exist and may end in any way."""
        await self._reader.until_ended(job_id)
        return await self.get(job_id)

    @property
    def reader(self) -> JobReader:
        """Follows jobs, as `stream` does, from any place and with the text of their tokens."""
        return self._reader


def _acting(key_id: str, question: Question[Answer]) -> Question[Answer]:
    return acting(f"key {key_id}", question)


def _live_pipelines(connection: Connection, asked: Sequence[None]) -> list[Pipelines]:
    found = live_pipelines(connection)
    return [found for _ in asked]
