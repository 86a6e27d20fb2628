"""The client for ordinary threads. Each call takes its connections from one pool, so threads may
share it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Literal, Self, Unpack, overload
from uuid import UUID

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from shardline.base.errors import Unavailable
from shardline.client import questions
from shardline.client.base_client import BaseClient
from shardline.client.database import check_driver, reachable
from shardline.client.decisions import AnyQuestion, Input, decisions_of, question_requests
from shardline.client.ends import SyncEnds
from shardline.client.fields import JobFields
from shardline.client.job_stream import JobStream
from shardline.client.partial_inserts import Outcomes, insert_some, skips
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
from shardline.store.connection.database import connect
from shardline.store.dead_letters import DeadLetter
from shardline.store.listing import PageEnd
from shardline.store.progress import read_progress
from shardline.streams import SyncDeltaReader


class Client(BaseClient[Engine]):
    """`with Client() as client:`; addresses come from the environment (SHARDLINE_*) where not
    given.

    A job is accepted when `submit` returns, or, with `session=`, when the caller's transaction
    commits. A process that was forked gets new connections; those of its parent stay as they are.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
        request = request_of(model, prompt, fields, self.tenant)
        return self._ask(questions.insert([request]), session)[0]

    @overload
    def submit_many(
        self,
        requests: Iterable[AnyRequest],
        *,
        n: int = 1,
        on_error: Literal["raise"] = "raise",
        session: Session | Connection | None = None,
    ) -> Ids: ...

    @overload
    def submit_many(
        self,
        requests: Iterable[AnyRequest],
        *,
        n: int = 1,
        on_error: Literal["skip"],
        session: Session | Connection | None = None,
    ) -> Outcomes: ...

    def submit_many(
        self,
        requests: Iterable[AnyRequest],
        *,
        n: int = 1,
        on_error: Literal["raise", "skip"] = "raise",
        session: Session | Connection | None = None,
    ) -> Ids | Outcomes:
        """Store all of them in one transaction, or none; ids in the same order. Each request has
        `n` choices, with adjacent ids. With `on_error="skip"` what can be stored is,
        and of each other request its error stands in place of an id.

        A type checker knows the fields of `JobRequest(model=…, …)`, not those of a mapping.
        """
        if skips(on_error):
            return self._ask(insert_some(requests, self.tenant, n), session)
        return self._ask(questions.insert(checked(requests, self.tenant), n), session)

    def decide(
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
        ids = self.submit_many(asked)
        return decisions_of(self.wait(ids, timeout_s))

    def embed(
        self,
        model: str,
        texts: Iterable[AnyText],
        *,
        timeout_s: float | None = None,
        **fields: Unpack[JobFields],
    ) -> Vectors:
        """Turn texts, or their token ids, into vectors, each as a job; in order. Raises as
        `submit_many` and `wait` do."""
        ids = self.submit_many(text_requests(model, texts, fields, self.tenant))
        return vectors_of(self.wait(ids, timeout_s))

    def score(
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
        ids = self.submit_many(pair_requests(model, query, documents, fields, self.tenant))
        return scores_of(self.wait(ids, timeout_s))

    def get(self, job_id: JobId) -> Job:
        """The job, with its result if it has one. Raises NotFound."""
        wanted = as_id(job_id)
        (job,) = self._ask(partial(questions.rows, ids=[wanted]))
        return questions.existing(job, wanted)

    def get_many(self, ids: Iterable[JobId]) -> Jobs:
        """Those that exist, in the order of `ids`."""
        return self._ask(questions.get_many(ids))

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
        return self._ask(questions.list_jobs(state, model, limit, after))

    def list_dead(
        self, *, model: str | None = None, limit: int = 100, after: JobId | None = None
    ) -> Summaries:
        """Dead letters: jobs that failed because their crashes were used up. The newest first, in
        pages as `list`."""
        return self._ask(questions.list_dead(model, limit, after))

    def get_dead(self, job_id: JobId) -> DeadLetter:
        """A dead letter with its attempts. Raises NotFound, and Invalid for a job that is none."""
        return self._ask(questions.get_dead(job_id))

    def replay(self, job_id: JobId, *, idempotency_key: str | None = None) -> UUID:
        """Submit a dead letter as a new job: same prompt, parameters and seed. Raises NotFound,
        Invalid, Conflict."""
        return self._ask(questions.replay(job_id, idempotency_key))

    def cancel(self, ids: JobId | Iterable[JobId]) -> dict[UUID, JobState]:
        """Ask for the end of jobs. Their states afterwards: a running one is `cancelled` a little
        later."""
        return self._ask(questions.cancel(ids))

    def cancel_where(self, where: AnyFilter, *, dry_run: bool = False) -> int:
        """Ask for the end of all jobs that match. Returns how many there were, or would be. The
        filter's tenant is its field `tenant`; without it jobs of all tenants are meant."""
        return self._act(questions.act_on(Act.CANCEL, where), dry_run)

    def retry_where(self, where: AnyFilter, *, dry_run: bool = False) -> int:
        """Submit all jobs that match again, which failed or are in the filter's state, as `replay`
        does; each once. Returns how many."""
        return self._act(questions.act_on(Act.RETRY, where), dry_run)

    def prioritize_where(self, where: AnyFilter, priority: int, *, dry_run: bool = False) -> int:
        """Give all queued jobs that match this priority. Returns how many had another."""
        return self._act(questions.act_on(Act.PRIORITIZE, where, priority), dry_run)

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
        self._ask(questions.check_exist(wanted))
        self._ends.wait(wanted, timeout_s)
        found = self._ask(questions.outcomes(wanted, must_succeed=must_succeed))
        return found[0] if is_one(ids) else found

    def stream(self, job_id: JobId) -> Iterator[Delta]:
        """The job's new tokens as they come, each once, the last with its state. Raises as `wait`
        does at the end, and Diverged when the job goes on with other tokens than were given.

        Text of tokens that did not come through Redis is in the last delta.
        """
        wanted = as_id(job_id)
        stream = JobStream(wanted)
        reader = SyncDeltaReader(self._redis, wanted)
        while True:
            self._catch_up(stream)
            for delta in stream.take():
                yield delta
                if delta.state not in (None, JobState.SUCCEEDED):
                    succeeded(self.get(wanted), delta.state)
            if stream.ended:
                return
            stream.hear(reader.read(self._settings.times.poll_s), is_away=reader.is_away)

    def _catch_up(self, stream: JobStream) -> None:
        while question := stream.question:
            try:
                (progress,) = self._ask(partial(read_progress, asked=[question]))
            except Unavailable:
                stream.skip()
            else:
                stream.answer(progress)

    def _open(self, url: str, database: Engine | None) -> None:
        self._database = database or connect(url)
        self._redis = SyncDeltaReader.connect(self._settings.redis_url)
        self._listen_here()

    def _act(self, act: BulkAct, dry_run: bool) -> int:
        """Page by page, each in a transaction: what was done stays, if a later one fails."""
        if dry_run:
            return self._ask(questions.count_of(act))
        progress = BulkProgress()
        while progress.has_more:
            progress = self._ask(questions.next_page(act, progress))
        return progress.num_changed

    def _ask(
        self,
        question: Question[Answer],
        session: Session | Connection | None = None,
    ) -> Answer:
        """Asks in a separate transaction, or in the caller's."""
        if session is not None:
            theirs = session if isinstance(session, Connection) else session.connection()
            check_driver(theirs.dialect)
            return question(theirs)
        self._move_here()
        with reachable(), self._database.begin() as connection:
            return question(connection)

    def _move_here(self) -> None:
        """Moves to this process: after a fork the connections, and the threads that waited, are its
        parent's."""
        if self._pid == os.getpid():
            return
        if self._owns_database:
            self._database.dispose(close=False)
        self._listen_here()
        self._pid = os.getpid()

    def _listen_here(self) -> None:
        poll_s = self._settings.times.poll_s
        url = self._database.url
        self._ends = SyncEnds(lambda ids: self._ask(questions.ended(ids)), url, poll_s=poll_s)
