"""How a live job ended: its row in Postgres, its last stream entry, Celery's verdict, its line in
the log."""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import structlog

from services.stage.jobs.chat_replies import ChatReplies
from services.stage.jobs.live_job import LiveJob
from shardline.contract.decision import Decision, decide
from shardline.contract.job import FinishReason, JobState, Result, Usage
from shardline.contract.wire import Delta
from shardline.store.connection.database import Failure
from shardline_scheduler.events import SequenceFailed, SequenceFinished
from shardline_server.celery_results import completion
from shardline_server.store.ends import End
from shardline_server.tracing import JobTrace

log = structlog.get_logger(__name__)

STATES = {
    FinishReason.STOP: JobState.SUCCEEDED,
    FinishReason.LENGTH: JobState.SUCCEEDED,
    FinishReason.CANCELLED: JobState.CANCELLED,
    FinishReason.EXPIRED: JobState.EXPIRED,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobOutcome:
    """The engine's last event of a live job."""

    job: LiveJob
    event: SequenceFinished | SequenceFailed
    replies: ChatReplies
    """Reads the text of a chat."""
    code: str = "engine"
    """The error's, if it failed."""

    @property
    def state(self) -> JobState:
        """The row's terminal state."""
        return (
            STATES[self.event.reason]
            if isinstance(self.event, SequenceFinished)
            else JobState.FAILED
        )

    @property
    def may_try_again(self) -> bool:
        """Whether its policy names failures as this one."""
        policy = self.job.claimed.retry
        is_named = policy is not None and "engine" in policy.on
        is_engine = isinstance(self.event, SequenceFailed) and self.code == "engine"
        return is_named and is_engine

    def refused(self, failure: Failure) -> JobOutcome:
        """Returns how the job ends if Postgres refuses this outcome lastingly."""
        problem = f"Postgres refuses its result (SQLSTATE {failure.sqlstate}): {failure.problem}"
        event = SequenceFailed(key=self.event.key, reason=problem)
        return replace(self, event=event, code="refused_by_database")

    @property
    def num_rows(self) -> int:
        """Token rows that its attempt took."""
        event = self.event
        if isinstance(event, SequenceFailed):
            return self.job.num_rows()
        if event.vector:
            return len(self.job.claimed.prompt_ids)
        return self.job.num_rows(event.num_cached)

    def row(self) -> End:
        """What is committed: a result with the completion, whole or partial, or the reason of a
        failure."""
        job = self.job
        event = self.event
        claimed = job.claimed
        if isinstance(event, SequenceFailed):
            error = {"code": self.code, "problem": event.reason}
            return End(job_id=claimed.job_id, fence=claimed.fence, state=self.state, error=error)
        reply = self.replies.read(claimed, event.text, event.output_ids)
        result = Result(
            job_id=claimed.job_id,
            text=event.text,
            token_ids=event.output_ids,
            usage=Usage(
                prompt_tokens=len(claimed.prompt_ids),
                completion_tokens=len(event.output_ids),
                cached_tokens=event.num_cached,
                reasoning_tokens=reply.num_reasoning_tokens,
            ),
            finish_reason=event.reason,
            exact=job.exact,
            logprobs=event.logprobs,
            prompt_logprobs=event.prompt_logprobs,
            reasoning=reply.reasoning,
            tool_calls=reply.tool_calls,
            decision=self.decision,
            embedding=self._embedding,
            score=self._score,
            timings=job.timings(),
            provenance=job.provenance(),
        )
        return End(job_id=claimed.job_id, fence=claimed.fence, state=self.state, result=result)

    @property
    def decision(self) -> Decision | None:
        """The answer to the job's question, once it has one."""
        question = self.job.claimed.params.question
        if question is None or isinstance(self.event, SequenceFailed) or not self.event.logprobs:
            return None
        logprobs = [logprob for _, logprob in self.event.logprobs[0].top]
        # Unequal where a hand has changed the row between two attempts.
        return decide(question, logprobs) if len(logprobs) == len(question.options) else None

    @property
    def _embedding(self) -> tuple[float, ...] | None:
        """The vector of the job's text, where it was asked for one."""
        return None if self.job.claimed.params.document is not None else self._vector()

    @property
    def _score(self) -> float | None:
        vector = self._vector()
        return None if self.job.claimed.params.document is None or not vector else vector[0]

    def _vector(self) -> tuple[float, ...] | None:
        if isinstance(self.event, SequenceFailed) or not self.event.vector:
            return None
        numbers = array("f", self.event.vector)
        if sys.byteorder == "big":
            numbers.byteswap()
        return tuple(numbers)

    def last_delta(self) -> Delta:
        """Tells readers of the stream that the row is committed."""
        fence = self.job.claimed.fence
        start = len(self.job.ids)
        if isinstance(self.event, SequenceFailed):
            return Delta(fence=fence, start=start, state=self.state)
        return Delta(
            fence=fence,
            start=start,
            text=self.event.tail,
            state=self.state,
            finish_reason=self.event.reason,
        )

    def value(self) -> Any:
        """The completion, or the reason of a failure, for a result backend."""
        if isinstance(self.event, SequenceFailed):
            return self.event.reason
        claimed = self.job.claimed
        reply = self.replies.read(claimed, self.event.text, self.event.output_ids)
        return completion(
            job_id=str(self.job.job_id),
            text=self.event.text,
            token_ids=self.event.output_ids,
            finish_reason=str(self.event.reason),
            num_prompt=len(claimed.prompt_ids),
            decision=msgspec.to_builtins(self.decision),
            reasoning=reply.reasoning,
            tool_calls=msgspec.to_builtins(reply.tool_calls),
            embedding=self._embedding,
            score=self._score,
        )

    def settle(self) -> None:
        """Celery's verdict and the log's line, after COMMIT."""
        delivery = self.job.delivery
        self._tell()
        if self.state is JobState.SUCCEEDED:
            delivery.succeed({"id": str(self.job.job_id), "completion_tokens": len(self.job.ids)})
        elif isinstance(self.event, SequenceFailed):
            delivery.fail(self.event.reason)
        else:
            delivery.revoke()

    def _tell(self) -> None:
        claimed = self.job.claimed
        event = self.event
        log.info(
            "job ended",
            job_id=str(claimed.job_id),
            trace_id=JobTrace.of(claimed.job_id, claimed.traceparent).trace,
            fence=claimed.fence,
            model=self.job.identity.model,
            outcome=str(self.state),
            reason=event.reason,
            prompt_tokens=len(claimed.prompt_ids),
            completion_tokens=len(self.job.ids),
            **self.job.timings(),
        )
