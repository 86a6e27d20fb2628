"""Follows jobs, for any number of tasks of one event loop: their new tokens and their ends. Knows
no producer.

Owns the connection that listens for ends, the reader of the streams, and the task that reads rows
for all readers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from shardline.base.config import Settings
from shardline.base.errors import Invalid, Unavailable
from shardline.client.ends import Ends
from shardline.client.job_stream import Deltas, JobStream, TextRule
from shardline.client.query_batcher import QueryBatcher
from shardline.store.progress import read_progress
from shardline.streams import DeltaBuffer, DeltaReader, Place

log = structlog.get_logger(__name__)

MAX_FOLLOWED = 64
"""Followed jobs of which one query reads the new tokens."""

MAX_SAID_AT_ONCE = 256
"""Tokens turned to text between two looks at other tasks; more go to a thread."""


class JobReader:
    """Its tasks and connections begin with the first job that is followed."""

    def __init__(self, database: AsyncEngine, settings: Settings) -> None:
        self._poll_s = settings.times.poll_s
        self._reader = DeltaReader(settings.redis_url)
        self._ends = Ends(database, poll_s=self._poll_s)
        self._progress = QueryBatcher(
            database, read_progress, max_batch=MAX_FOLLOWED, name="progress"
        )

    async def close(self) -> None:
        """End the tasks and give back the connections."""
        await self._ends.close()
        await self._progress.close()
        await self._reader.close()

    async def until_ended(self, job_id: UUID) -> None:
        """Returns once a job that is known to exist has ended, in any way, or was deleted."""
        buffer = DeltaBuffer()
        with self._ends.watch(job_id, buffer):
            while not buffer.ended:
                await buffer.bell.wait()

    async def follow(
        self,
        job_id: UUID,
        *,
        after: Place | None = None,
        text_rule: TextRule | None = None,
        tick_s: float | None = None,
    ) -> AsyncIterator[Deltas]:
        """The job's new tokens as they come, each once; an empty list at every tick without news.

        Joins behind `after`. With `text_rule` the text of tokens read from Postgres comes at once.
        Ends after the delta that has a state. Raises NotFound, and Diverged when the job goes on
        with other tokens than were given.
        """
        buffer = DeltaBuffer()
        stream = JobStream(job_id, after=after, text_rule=text_rule, is_away=self._reader.is_away)
        wait_s = min(self._poll_s, tick_s or self._poll_s)
        with self._ends.watch(job_id, buffer), self._reader.watch(job_id, buffer):
            while True:
                await self._catch_up(stream)
                yield stream.take()
                if stream.ended:
                    return
                deltas = await buffer.wait(wait_s)
                stream.hear(deltas, is_away=self._reader.is_away, has_ended=buffer.ended)

    async def _catch_up(self, stream: JobStream) -> None:
        while question := stream.question:
            try:
                progress = await self._progress.read(question)
            except (Invalid, Unavailable) as error:
                # Of a batch, in which another job's rows may be over a limit of Postgres.
                job_id = str(question.job_id)
                log.warning("a stream waits for its rows", job_id=job_id, error=str(error))
                stream.skip()
                continue
            if progress is not None and stream.num_texts(progress) > MAX_SAID_AT_ONCE:
                await asyncio.to_thread(stream.answer, progress)
            else:
                stream.answer(progress)
