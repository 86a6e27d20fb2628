"""The jobs that one request stands for: waits for all of them, or cancels those that have no
waiter left. Knows no route.

A caller who disconnects cancels them, unless the request can be repeated: with an id or a key of
the caller's own the repeat finds the same jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self
from uuid import UUID

import structlog
from fastapi import Request

from services.gateway.context import Gateway
from services.gateway.errors import Stopping, error_of_job
from services.gateway.http.sse import disconnected
from shardline.base.aio import cancel_and_wait
from shardline.base.errors import JobEnded, Unavailable
from shardline.client import questions
from shardline.client.job_reader import JobReader
from shardline.client.requests import succeeded
from shardline.contract.job import Job, JobRequest, Result
from shardline.store.inserts import StoredRequest

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobGroup:
    """Committed jobs, in the request's order."""

    job_ids: list[UUID]
    is_repeatable: bool

    @classmethod
    def of(cls, stored: StoredRequest, request: JobRequest) -> Self:
        """Returns what a request was stored as."""
        return cls(
            job_ids=[stored.job_id, *stored.others],
            is_repeatable=request.id is not None or request.idempotency_key is not None,
        )


async def wait_for_group(gateway: Gateway, request: Request, group: JobGroup) -> list[Job] | None:
    """The ended jobs, or None when the caller left first. Raises Stopping, NotFound."""
    reader = gateway.client.reader
    waiting = asyncio.create_task(_until_ended(reader, group.job_ids))
    leaving = asyncio.create_task(disconnected(request))
    stopping = asyncio.create_task(gateway.stopping.wait())
    try:
        await asyncio.wait({waiting, leaving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            waiting.result()
            outcomes = questions.outcomes(group.job_ids, must_succeed=False)
            return await gateway.client.ask(outcomes)
        if not leaving.done():
            raise Stopping(group.job_ids[0])
        await _abandon(gateway, group)
        return None
    finally:
        for task in (waiting, leaving, stopping):
            await cancel_and_wait(task)


def result_of(job: Job) -> Result:
    """The result of a job that has succeeded. Raises how another one ended."""
    try:
        result = succeeded(job).result
    except JobEnded as ended:
        raise error_of_job(job, ended) from ended
    assert result is not None, "a succeeded job has a result"
    return result


async def _until_ended(reader: JobReader, job_ids: Sequence[UUID]) -> None:
    await asyncio.gather(*(reader.until_ended(job_id) for job_id in job_ids))


async def _abandon(gateway: Gateway, group: JobGroup) -> None:
    """Cancel jobs that no caller waits for or can ask for again."""
    if group.is_repeatable:
        return
    gateway.metrics.abandoned.inc()
    try:
        await gateway.client.cancel(group.job_ids)
    except Unavailable as error:
        log.warning(
            "abandoned jobs continue: cancel failed",
            job_id=str(group.job_ids[0]),
            error=str(error),
        )
