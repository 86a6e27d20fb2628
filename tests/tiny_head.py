"""A head without a model, for tests of doors: it plays the protocol through real rows and streams,
and echoes prompts.

Owns the clerk's registration and one pipeline. Completions are the prompt's own tokens, so that
tests know them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import msgspec
import psycopg
from sqlalchemy import text

from shardline.base.errors import Invalid
from shardline.contract.chat import Message
from shardline.contract.decision import Decision, decide
from shardline.contract.job import (
    FinishReason,
    JobState,
    Result,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from shardline.contract.tables import JOBS_CHANNEL
from shardline.contract.wire import Delta
from shardline.store import models, pipelines
from shardline.store.connection.database import connect
from shardline.store.statistics.costs import EpochEnergy, put_epoch_energy
from shardline.streams import DeltaWriter
from shardline_server.store import claims, ends, leases
from shardline_server.store.claims import Claimant, ClaimedJob
from shardline_server.store.ends import End
from shardline_server.store.leases import Beat
from shardline_server.tokenize import CompletionText, Tokens, model_row
from tests.polling import until
from tests.repository import REPOSITORY

CLERK = REPOSITORY / "services/standalone/demo/clerk/model"
LEASE_S = 60.0
NUM_CACHED = 2
"""Tokens of each prompt that it says it has not computed."""
ROW_J = 100.0
"""What each token row takes."""
UNPREPARED = text(
    "SELECT id, prompt, messages, prompt_ids, params FROM jobs"
    " WHERE prepared_at IS NULL AND state = 'queued'"
)
PREPARE = text(
    "UPDATE jobs SET prompt_ids = :ids, max_tokens = :max_tokens, prepared_at = now()"
    " WHERE id = :id"
)
QUEUED = text("SELECT id FROM jobs WHERE state = 'queued' ORDER BY priority, created_at, id")


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One claimed job: what it will say, and how much of it was said."""

    claimed: ClaimedJob
    output_ids: tuple[int, ...]
    reason: FinishReason
    num_said: int
    num_saved: int
    logprobs: tuple[TokenLogprob, ...] = field(default=())


def _decision(claimed: ClaimedJob) -> Decision | None:
    """The first option has half of what the labels have, which is all there is."""
    question = claimed.params.question
    if question is None:
        return None
    num_others = len(question.options) - 1
    return decide(question, [math.log(0.5), *[math.log(0.5 / num_others)] * num_others])


class TinyHead:
    """Each step is a call, so that a test decides what has happened when; `serving` runs all by
    itself."""

    def __init__(self, database_url: str, redis_url: str | None = None) -> None:
        self._is_ready = False
        self._url = database_url
        self.database = connect(database_url)
        self._writer = DeltaWriter(redis_url) if redis_url else None
        row = clerk_row()
        self.tokens = Tokens.from_row(row)
        with self.database.begin() as connection:
            models.register_model(connection, row)
            epoch = pipelines.take_epoch(
                connection, "tiny", model="clerk", fingerprint="f1", head="tiny", lease_s=LEASE_S
            )
        assert epoch is not None, "another tiny head lives"
        self._epoch = epoch

    def close(self) -> None:
        """Give back the connections."""
        if self._writer is not None:
            self._writer.close()
        self.database.dispose()

    def ready(self, kv_tokens: int = 4096) -> None:
        """From now on the pipeline can generate."""
        self._is_ready = True
        stages = [{"layers": "0-7"}]
        energy = EpochEnergy(
            pipeline="tiny",
            epoch=self._epoch,
            source="table",
            energy_j=ROW_J * 1_000,
            num_rows=1_000,
        )
        with self.database.begin() as connection:
            put_epoch_energy(connection, energy)
            pipelines.ready(
                connection,
                "tiny",
                self._epoch,
                seats=8,
                stages=stages,
                exact=True,
                kv_tokens=kv_tokens,
            )

    def claim_all(self) -> list[Sequence]:
        """Prepare and claim every queued job. A head that claims has said how much KV it has."""
        if not self._is_ready:
            self.ready()
        with self.database.begin() as connection:
            for row in connection.execute(UNPREPARED).all():
                prepared = self.tokens.prepare(
                    prompt=row.prompt if row.prompt is not None else tuple(row.prompt_ids or ()),
                    messages=row.messages and msgspec.convert(row.messages, list[Message]),
                    params=msgspec.convert(row.params, SamplingParams),
                )
                values = {
                    "ids": list(prepared.prompt_ids),
                    "max_tokens": prepared.max_tokens,
                    "id": row.id,
                }
                connection.execute(PREPARE, values)
        with self.database.begin() as connection:
            claimed = claims.claim(
                connection,
                list(connection.scalars(QUEUED)),
                Claimant(
                    worker="tiny",
                    pipeline="tiny",
                    epoch=self._epoch,
                    fingerprint="f1",
                    exactness="e1",
                ),
                lease_s=LEASE_S,
                exact_wait_s=0.0,
            )
        return [self._sequence(row) for row in claimed]

    def claim(self) -> Sequence:
        """The only queued job."""
        (sequence,) = self.claim_all()
        return sequence

    def say(self, sequence: Sequence, num_tokens: int = 1, *, to_stream: bool = True) -> None:
        """Generate so many tokens more, one delta each."""
        for _ in range(num_tokens):
            start = sequence.num_said
            sequence.num_said = sequence.num_said + 1
            delta = Delta(
                fence=sequence.claimed.fence,
                start=start,
                ids=sequence.output_ids[start : start + 1],
                text=self._text(sequence, start, start + 1),
                logprobs=sequence.logprobs[start : start + 1] or None,
            )
            if to_stream and self._writer is not None:
                self._writer.write([(sequence.claimed.job_id, delta)])

    def beat(self, sequence: Sequence) -> bool:
        """Heartbeat and checkpoint; whether the job is to be cancelled."""
        claimed = sequence.claimed
        beat = Beat(
            job_id=claimed.job_id,
            fence=claimed.fence,
            start=sequence.num_saved,
            ids=sequence.output_ids[sequence.num_saved : sequence.num_said],
            logprobs=sequence.logprobs[sequence.num_saved : sequence.num_said],
        )
        with self.database.begin() as connection:
            reply = leases.heartbeat(connection, [beat], lease_s=LEASE_S)[
                claimed.job_id, claimed.fence
            ]
        sequence.num_saved = sequence.num_said
        return reply.cancel_requested

    def end(
        self, sequence: Sequence, state: JobState = JobState.SUCCEEDED, *, to_stream: bool = True
    ) -> None:
        """Commit the result of what was said, or a failure, and tell the stream."""
        claimed = sequence.claimed
        num_said = sequence.num_said
        reason = sequence.reason if state is JobState.SUCCEEDED else FinishReason.CANCELLED
        completion = self._completion(sequence)
        result = Result(
            job_id=claimed.job_id,
            text=completion.say(sequence.output_ids[:num_said]) + (tail := completion.flush()),
            token_ids=sequence.output_ids[:num_said],
            usage=Usage(
                prompt_tokens=len(claimed.prompt_ids),
                completion_tokens=num_said,
                cached_tokens=NUM_CACHED,
            ),
            finish_reason=reason,
            exact=True,
            logprobs=sequence.logprobs[:num_said] or None,
            decision=_decision(claimed) if num_said else None,
            timings={"running_s": 0.1},
            provenance={"weights": "f1"},
        )
        failed = state is JobState.FAILED
        end = End(
            job_id=claimed.job_id,
            fence=claimed.fence,
            state=state,
            result=None if failed else result,
            error={"code": "poison", "message": "it broke the engine"} if failed else None,
        )
        self._commit(end)
        if to_stream and self._writer is not None:
            last = Delta(
                fence=claimed.fence,
                start=num_said,
                text="" if failed else tail,
                state=state,
                finish_reason=None if failed else reason,
            )
            self._writer.write([(claimed.job_id, last)])

    def finish(self, sequence: Sequence) -> None:
        """Say all that is left, and end."""
        self.say(sequence, len(sequence.output_ids) - sequence.num_said)
        self.end(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """The job waits again, with what was saved."""
        key = (sequence.claimed.job_id, sequence.claimed.fence)

        def is_released() -> bool:
            with self.database.begin() as connection:
                return bool(ends.release_running(connection, [key]))

        until(is_released)

    def resume_otherwise(self, sequence: Sequence) -> Sequence:
        """A head of another exactness goes on: its tokens differ from those that were streamed and
        not saved."""
        self.give_back(sequence)
        other = self.claim()
        saved = other.claimed.output_ids
        other.output_ids = (
            *saved,
            *(token_id + 1 for token_id in sequence.output_ids[len(saved) : -1]),
            *self.tokens.eos_ids,
        )
        return other

    def refuse(self, sequence: Sequence, *, field: str) -> None:
        """End it as a relay ends what it finds invalid."""
        error = Invalid(field, "it is wrong", "Send another").as_dict()
        end = End(
            job_id=sequence.claimed.job_id,
            fence=sequence.claimed.fence,
            state=JobState.FAILED,
            error=error,
        )
        self._commit(end)

    def wait_for_bell(self) -> None:
        """Until rows were inserted or cancelled; at most a moment, since a bell may have rung
        before."""
        with psycopg.connect(self._url, autocommit=True) as listener:
            listener.execute(f"LISTEN {JOBS_CHANNEL}")
            for _ in listener.notifies(timeout=0.1, stop_after=1):
                pass

    @contextmanager
    def serving(self) -> Iterator[None]:
        """While inside, every job runs to its end as soon as it is there."""
        stopped = threading.Event()
        thread = threading.Thread(target=self._serve, args=(stopped,), name="tiny-head")
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()

    def _serve(self, stopped: threading.Event) -> None:
        with psycopg.connect(self._url, autocommit=True) as listener:
            listener.execute(f"LISTEN {JOBS_CHANNEL}")
            while not stopped.is_set():
                for sequence in self.claim_all():
                    self.finish(sequence)
                for _ in listener.notifies(timeout=0.1, stop_after=1):
                    pass

    def _commit(self, end: End) -> None:
        """Ends a job. While a relay has its row locked, its head tries again."""

        def is_ended() -> bool:
            with self.database.begin() as connection:
                return ends.end_running(connection, [end])[end.job_id] is not JobState.RUNNING

        until(is_ended)

    def _sequence(self, claimed: ClaimedJob) -> Sequence:
        """The prompt without its first token, then the end of sequence, cut at max_tokens."""
        whole = (*claimed.prompt_ids[1:], *self.tokens.eos_ids)
        ids = whole[: claimed.max_tokens]
        logprobs: tuple[TokenLogprob, ...] = ()
        if claimed.params.logprobs is not None:
            top = tuple((token_id, -0.5 - token_id) for token_id in range(claimed.params.logprobs))
            logprobs = tuple(TokenLogprob(token_id, -0.25, top) for token_id in ids)
        return Sequence(
            claimed=claimed,
            output_ids=ids,
            reason=FinishReason.STOP if len(ids) == len(whole) else FinishReason.LENGTH,
            num_said=len(claimed.output_ids),
            num_saved=len(claimed.output_ids),
            logprobs=logprobs,
        )

    def _text(self, sequence: Sequence, start: int, stop: int) -> str:
        """What a head gives out with these tokens."""
        completion = self._completion(sequence)
        completion.say(sequence.output_ids[:start])
        return completion.say(sequence.output_ids[start:stop])

    def _completion(self, sequence: Sequence) -> CompletionText:
        claimed = sequence.claimed
        return self.tokens.completion(claimed.params, claimed.max_tokens, claimed.prompt_ids)


def clerk_row() -> dict[str, Any]:
    """As the clerk's head registers it."""
    return model_row(
        CLERK, name="clerk", fingerprint="f1", context_length=512, vocab_size=896, eos_ids=(2,)
    )


def energy_j(num_prompt: int, num_output: int) -> float:
    """What one job of so many tokens takes."""
    return ROW_J * (num_prompt - NUM_CACHED + num_output - 1)


@contextmanager
def tiny_head(database_url: str, redis_url: str | None = None) -> Iterator[TinyHead]:
    """A head that is ready, closed at the end."""
    head = TinyHead(database_url, redis_url)
    head.ready()
    try:
        yield head
    finally:
        head.close()


def job_ids(sequences: list[Sequence]) -> list[UUID]:
    """Of claimed jobs."""
    return [sequence.claimed.job_id for sequence in sequences]
