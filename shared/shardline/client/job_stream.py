"""One reader's way through one job's output, from its first question to its end. Without I/O.

Redis is ahead of Postgres, and Postgres is the truth: decides when to ask it, and for which tokens.
Their order is the Cursor's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from uuid import UUID

from shardline.client.questions import existing
from shardline.contract.job import JobProgress, SamplingParams
from shardline.contract.wire import Delta
from shardline.store.progress import ProgressQuestion
from shardline.streams import Cursor, Place, TextOf

Deltas = list[Delta]
TextRule = Callable[[SamplingParams, int, Sequence[int]], TextOf]
"""For a job of these parameters, `max_tokens` and last tokens of its prompt: the text that a head
gives out with its tokens."""


class JobStream:
    """Its client asks Postgres each `question`, passes on the answer and what Redis has, and gives
    its reader what `take` returns.

    Joins behind `after`. With `text_rule` the text of tokens read from Postgres comes at once.
    """

    def __init__(
        self,
        job_id: UUID,
        *,
        after: Place | None = None,
        text_rule: TextRule | None = None,
        is_away: bool = False,
    ) -> None:
        self._job_id = job_id
        self._cursor = Cursor(after=after)
        self._text_rule = text_rule
        # First the newest attempt's number: earlier ones may have streamed what counts no more.
        self._is_asking = True
        self._only_learns = text_rule is None and after is None and not is_away

    @property
    def ended(self) -> bool:
        """Whether the last delta has been taken, or may be."""
        return self._cursor.ended

    @property
    def question(self) -> ProgressQuestion | None:
        """What Postgres must answer before the stream is heard again; None if nothing."""
        if not self._is_asking:
            return None
        lacks_rule = self._text_rule is not None and self._cursor.text_of is None
        asked = self._cursor.asked(only_learn=self._only_learns)
        return ProgressQuestion(self._job_id, *asked, with_prompt_end=lacks_rule)

    def answer(self, progress: JobProgress | None) -> None:
        """Take in a page of what Postgres has, None if it has no such job. Raises NotFound, and
        Diverged when the job goes on with other tokens than were given."""
        progress = existing(progress, self._job_id)
        cursor = self._cursor
        rule = self._text_rule
        max_tokens = progress.max_tokens
        if rule is not None and cursor.text_of is None and max_tokens is not None:
            cursor.text_of = rule(progress.params, max_tokens, progress.prompt_end)
        cursor.catch_up(progress, only_learn=self._only_learns)
        is_whole = progress.is_whole and (progress.state is None or cursor.ended)
        self._is_asking = not is_whole
        self._only_learns = self._only_learns and not progress.is_whole

    def num_texts(self, progress: JobProgress) -> int:
        """Counts the tokens that this answer turns to text."""
        return 0 if self._text_rule is None else self._cursor.num_unsaid + len(progress.token_ids)

    def skip(self) -> None:
        """While Postgres is unreachable, the stream alone must do."""
        self._is_asking = False

    def hear(self, deltas: Deltas, *, is_away: bool, has_ended: bool | None = None) -> None:
        """Take in what Redis has, or that it is away. Raises Diverged.

        `has_ended` is None where no client looks for ends: a silent stream then asks Postgres.
        """
        for delta in deltas:
            self._cursor.push(delta)
        lacks_tokens = is_away or self._cursor.has_gap or bool(has_ended)
        self._is_asking = not self.ended and (lacks_tokens or (has_ended is None and not deltas))
        # While the stream is whole it is ahead of Postgres, which then knows nothing but the end.
        self._only_learns = not lacks_tokens

    def take(self) -> Deltas:
        """What the reader gets now, in order; the last one has a state."""
        return self._cursor.take()
