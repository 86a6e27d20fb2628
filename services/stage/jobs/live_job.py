"""A live job: one claimed row, its ticket and its tokens so far. Knows neither Postgres nor the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from uuid import UUID

from services.stage.celery.delivery import Delivery
from services.stage.jobs.identity import Identity
from services.stage.scheduling.events import NewTokens
from shardline.job import TokenLogprob
from shardline.store.claims import Claimed
from shardline.store.leases import Beat
from shardline.wire import Delta


@dataclass(slots=True, kw_only=True, eq=False)
class LiveJob:
    """Filled by the ledger from the engine's events; `num_saved` output tokens are in Postgres."""

    claimed: Claimed
    ticket: Delivery
    identity: Identity
    """Who claimed it, in which epoch."""
    exact: bool
    ids: list[int]
    logprobs: list[TokenLogprob]
    num_saved: int
    parked: bool = False
    """It waits for KV: nothing of it is computed."""
    began_step: int = 0
    """The engine's count of steps when it was claimed; of a parked one, when it began."""
    began_s: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None
    held: list[Delta] = field(default_factory=list)
    """Deltas of a job that is not exact wait for the commit that holds their tokens."""
    num_passed_over: int = 0
    """Beats in a row that saved no token of it: there were too many log-probabilities."""

    @classmethod
    def from_claim(cls, claimed: Claimed, ticket: Delivery, identity: Identity, num_steps: int) -> LiveJob:
        """A job just claimed, with the tokens of earlier attempts."""
        return cls(
            claimed=claimed,
            ticket=ticket,
            identity=identity,
            exact=identity.exact and claimed.exact,
            ids=list(claimed.output_ids),
            logprobs=list(claimed.logprobs or ()),
            num_saved=len(claimed.output_ids),
            parked=claimed.parked,
            began_step=num_steps,
        )

    @property
    def key(self) -> tuple[str, int]:
        """The engine's key: (job, fence)."""
        return str(self.claimed.job_id), self.claimed.fence

    @property
    def job_id(self) -> UUID:
        """The job's id."""
        return self.claimed.job_id

    @property
    def is_unproven(self) -> bool:
        """It runs and no token of this attempt is saved: a dead head would count as a crash."""
        return not self.parked and self.num_saved == len(self.claimed.output_ids)

    @property
    def num_known(self) -> int:
        """Tokens of prompt and output, which its KV holds while it runs."""
        return len(self.claimed.prompt_ids) + len(self.ids)

    def begin(self, num_steps: int) -> None:
        """Postgres knows that it runs from now on."""
        self.parked, self.began_step = False, num_steps

    def take(self, tokens: NewTokens) -> Delta:
        """Adds the engine's tokens; returns what a reader of the stream gets."""
        if self.first_token_s is None:
            self.first_token_s = time.monotonic()
        self.ids.extend(tokens.ids)
        self.logprobs.extend(tokens.logprobs)
        return Delta(
            fence=self.claimed.fence,
            start=tokens.start,
            ids=tokens.ids,
            text=tokens.text,
            logprobs=tokens.logprobs or None,
        )

    def beat(self) -> Beat:
        """What the next heartbeat saves: the tokens since the last one."""
        return Beat(
            job_id=self.claimed.job_id,
            fence=self.claimed.fence,
            start=self.num_saved,
            ids=tuple(self.ids[self.num_saved :]),
            logprobs=tuple(self.logprobs[self.num_saved :]),
        )

    def bare_beat(self) -> Beat:
        """A heartbeat that saves nothing."""
        return Beat(job_id=self.claimed.job_id, fence=self.claimed.fence, start=self.num_saved)

    def timings(self) -> dict[str, float]:
        """Seconds: waiting before this claim, to this attempt's first token, and in this attempt altogether."""
        now_s = time.monotonic()
        timings = {"queued_s": self.claimed.queued_s, "running_s": now_s - self.began_s}
        if self.first_token_s is not None:
            timings["first_token_s"] = self.first_token_s - self.began_s
        return {name: round(value, 6) for name, value in timings.items()}
