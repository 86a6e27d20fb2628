"""Follows jobs, for any number of tasks of one event loop: their new tokens and their ends. Knows
no producer.

Owns the connection that listens for ends, the reader of the streams, and the task that reads rows
for all readers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from uuid import UUID

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from shardline.base.config import Settings
from shardline.base.errors import NotFound
from shardline.client.database import AWAY, told
from shardline.client.ends import Ends
from shardline.client.query_batcher import QueryBatcher
from shardline.contract.job import SamplingParams
from shardline.contract.wire import Delta
from shardline.store.progress import ProgressQuestion, read_progress
from shardline.streams import Cursor, DeltaBuffer, DeltaReader, Place, TextOf

log = structlog.get_logger(__name__)

MAX_FOLLOWED = 64
"""Followed jobs of which one query reads the new tokens."""

MAX_SAID_AT_ONCE = 256
"""Tokens turned to text between two looks at other tasks; more go to a thread."""

Deltas = list[Delta]
TextRule = Callable[[SamplingParams, int, Sequence[int]], TextOf]
"""For a job of these parameters, `max_tokens` and last tokens of its prompt: the text that a head
gives out with its tokens."""


class JobReader:
    """Its tasks and connections begin with the first job that is followed."""

    def __init__(self, database: AsyncEngine, settings: Settings) -> None:
        self._poll_s = settings.times.poll_s
        self._reader = DeltaReader(settings.redis_url)
        self._ends = Ends(database, poll_s=self._poll_s)
        self._progress = QueryBatcher(
            database, read_progress, max_batch=MAX_FOLLOWED, name="progress"
        )
        self._started = False

    async def close(self) -> None:
        """End the tasks and give back the connections."""
        if self._started:
            await self._ends.close()
        await self._progress.close()
        await self._reader.close()

    async def until_ended(self, job_id: UUID) -> None:
        """Returns once a job that is known to exist has ended, in any way."""
        self._start()
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
        self._start()
        cursor = Cursor(after=after)
        buffer = DeltaBuffer()
        wait_s = min(self._poll_s, tick_s or self._poll_s)
        with self._ends.watch(job_id, buffer), self._reader.watch(job_id, buffer):
            # First of all the newest attempt's number: its predecessors may have streamed what
            # counts no more.
            only_learn = text_rule is None and after is None and not self._reader.is_away
            await self._catch_up(job_id, cursor, text_rule, only_learn=only_learn)
            while True:
                yield cursor.take()
                if cursor.ended:
                    return
                for delta in await buffer.wait(wait_s):
                    cursor.push(delta)
                if buffer.ended or cursor.has_gap or self._reader.is_away:
                    await self._catch_up(job_id, cursor, text_rule)

    async def _catch_up(
        self, job_id: UUID, cursor: Cursor, text_rule: TextRule | None, *, only_learn: bool = False
    ) -> None:
        """All pages. While Postgres is unreachable too, the stream alone must do."""
        is_whole = False
        while not is_whole:
            try:
                lacks_rule = text_rule is not None and cursor.text_of is None
                asked = ProgressQuestion(
                    job_id, *cursor.asked(only_learn=only_learn), with_prompt_end=lacks_rule
                )
                progress = await self._progress.read(asked)
            except (DBAPIError, *AWAY) as error:
                log.warning("a stream waits for its rows", job_id=str(job_id), error=told(error))
                return
            if progress is None:
                raise NotFound(f"no job has the id {job_id}")
            if text_rule is not None and cursor.text_of is None and progress.max_tokens is not None:
                cursor.text_of = text_rule(
                    progress.params, progress.max_tokens, progress.prompt_end
                )
            num_said = 0 if cursor.text_of is None else cursor.num_unsaid + len(progress.token_ids)
            if num_said > MAX_SAID_AT_ONCE:
                await asyncio.to_thread(cursor.catch_up, progress, only_learn=only_learn)
            else:
                cursor.catch_up(progress, only_learn=only_learn)
            is_whole = progress.is_whole and (progress.state is None or cursor.ended)
            only_learn = only_learn and not progress.is_whole

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._ends.start()
            self._reader.start()
