"""The client of the gateway: what a door on the network needs beyond a producer. No part of the public library."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncEngine

from shardline.client.asynchronous import AsyncClient, Summaries
from shardline.client.follower import Deltas, TextRule
from shardline.errors import NotFound
from shardline.job import Job, JobRequest, JobState
from shardline.store import costs, jobs, listing
from shardline.store.costs import Cost
from shardline.store.inserts import Tokenized
from shardline.store.listing import PageEnd
from shardline.streams import Place

Costs = list[Cost]
"""For annotations: inside the class `list` is the method."""


class GatewayClient(AsyncClient):
    """Acts for a tenant: with `tenant`, another tenant's job is as if it did not exist."""

    @property
    def database(self) -> AsyncEngine:
        """The pool that submits, reads and cancels."""
        return self._database

    async def insert(
        self, requests: Sequence[JobRequest], *, prepared: Sequence[Tokenized | None]
    ) -> Sequence[jobs.Stored]:
        """Store checked and tokenized requests in one transaction, or none; says which of them are new."""
        return await self._write(jobs.insert_jobs, requests, prepared=prepared)

    async def get(self, job_id: UUID, *, tenant: str | None = None) -> Job:
        """The job, with its result if it has one. Raises NotFound, with `tenant` also for another tenant's."""
        job = await super().get(job_id)
        if tenant not in (None, job.tenant):
            raise NotFound(f"no job has the id {job_id}")
        return job

    async def list(
        self,
        *,
        state: JobState | None = None,
        model: str | None = None,
        tenant: str | None = None,
        limit: int = 100,
        after: UUID | PageEnd | None = None,
    ) -> Summaries:
        """As `AsyncClient.list`, of one tenant or of all."""
        return await self._read_page(
            listing.list_jobs, state=state, model=model, tenant=tenant, limit=limit, after=after
        )

    async def costs(self, *, num_days: int, by: Collection[str], model: str | None, tenant: str | None) -> Costs:
        """What jobs took, of one tenant or of all: see `costs.costs`."""
        return await self._read_page(costs.costs, num_days=num_days, by=by, model=model, tenant=tenant)

    async def cancel(self, ids: UUID | Collection[UUID], *, tenant: str | None = None) -> dict[UUID, JobState]:
        """As `AsyncClient.cancel`; with `tenant`, another tenant's jobs are left out."""
        wanted = [ids] if isinstance(ids, UUID) else list(ids)
        return await self._write(jobs.request_cancel, wanted, tenant=tenant)

    async def until_ended(self, job_id: UUID) -> Job:
        """Like `wait` for a job that is known to exist and may end in any way."""
        await self._follower.until_ended(job_id)
        return await self.get(job_id)

    def follow(
        self,
        job_id: UUID,
        *,
        after: Place | None = None,
        text_rule: TextRule | None = None,
        tick_s: float | None = None,
    ) -> AsyncIterator[Deltas]:
        """What `stream` is made of: see JobFollower.follow."""
        return self._follower.follow(job_id, after=after, text_rule=text_rule, tick_s=tick_s)
