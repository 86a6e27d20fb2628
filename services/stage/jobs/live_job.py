"""A live job: one claimed row, its delivery and its tokens so far. Knows no statement and no
engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from services.stage.celery.delivery import Delivery
from services.stage.jobs.identity import Identity
from services.stage.jobs.latency import Latency
from shardline.base.clock import monotonic_s
from shardline.contract.job import TokenLogprob
from shardline.contract.wire import Delta
from shardline.store.connection.encoding import Key as AttemptKey
from shardline_scheduler.events import NewTokens
from shardline_server.store.claims import ClaimedJob
from shardline_server.store.leases import Beat

FORGIVEN_CLAIMS = 32
"""A job ends even if each of its attempts ends with a broken link: its crashes count from the claim
of this number on."""


@dataclass(slots=True, kw_only=True, eq=False)
class LiveJob:
    """The lease manager's thread writes it, but for the one field that is the engine's."""

    # Fixed by the claim.
    claimed: ClaimedJob
    delivery: Delivery
    identity: Identity
    """Who claimed it, in which epoch."""
    exact: bool
    began_s: float = field(default_factory=monotonic_s)

    # The engine's thread.
    first_token_s: float | None = None
    last_token_s: float | None = None
    broken_epoch: int = 0
    """The epoch that broke while this job ran alone."""

    # The lease manager's thread.
    ids: list[int]
    logprobs: list[TokenLogprob]
    num_saved: int
    """Output tokens that are in Postgres."""
    lease_ends_s: float
    """Until when it may run, by the lease clock: the end in its row, less the margin."""
    parked: bool = False
    """It waits for KV: nothing of it is computed."""
    is_held_up: bool = False
    """Another transaction had its row locked, at the last heartbeat or since."""
    adapter: str = ""
    """The fingerprint of its adapter; empty: it has none."""
    began_step: int = 0
    """The engine's count of steps when it was claimed; of a parked one, when it began."""
    held: list[Delta] = field(default_factory=list)
    """Deltas of a job that is not exact wait for the commit that holds their tokens."""
    num_passed_over: int = 0
    """Beats in a row that saved no token of it: there were too many log-probabilities."""

    @classmethod
    def from_claim(
        cls,
        claimed: ClaimedJob,
        delivery: Delivery,
        identity: Identity,
        *,
        num_steps: int,
        lease_ends_s: float,
    ) -> LiveJob:
        """A job just claimed, with the tokens of earlier attempts."""
        return cls(
            claimed=claimed,
            delivery=delivery,
            identity=identity,
            exact=identity.exact and claimed.exact,
            ids=list(claimed.output_ids),
            logprobs=list(claimed.logprobs or ()),
            num_saved=len(claimed.output_ids),
            lease_ends_s=lease_ends_s,
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
    def attempt(self) -> AttemptKey:
        """The store's key: (id, fence)."""
        return self.claimed.job_id, self.claimed.fence

    @property
    def is_quarantined(self) -> bool:
        """An engine died under an earlier attempt of it."""
        return self.claimed.crashes > 0

    @property
    def is_unsaved(self) -> bool:
        """It runs and no token of this attempt is saved: if the head died now, that would count as
        a crash."""
        return not self.parked and self.num_saved == len(self.claimed.output_ids)

    @property
    def num_known(self) -> int:
        """Tokens of prompt and output, which its KV holds while it runs."""
        return len(self.claimed.prompt_ids) + len(self.ids)

    def num_rows(self, num_cached: int = 0) -> int:
        """Token rows that this attempt took: its last token needs none. As `job_costs` has it."""
        is_begun = len(self.ids) > len(self.claimed.output_ids)
        return self.num_known - num_cached - 1 if is_begun else 0

    def keeps_bits_on(self, identity: Identity) -> bool:
        """Whether stages of this exactness may go on with it: an exact job gets its tokens from one
        exactness only."""
        return not self.exact or self.identity.exactness == identity.exactness

    def is_blamed(self, formed: Identity | None) -> bool:
        """Whether what broke its epoch may be its doing: a process that served it is missing in the
        pipeline `formed` since, or none was formed in time. Broken links are forgiven until it has
        been claimed FORGIVEN_CLAIMS times."""
        return (
            formed is None
            or not self.identity.processes <= formed.processes
            or self.claimed.fence >= FORGIVEN_CLAIMS
        )

    def provenance(self) -> dict[str, Any]:
        """Returns it as stored with its result."""
        found = self.identity.provenance()
        if self.adapter:
            found["adapter"] = {"name": self.claimed.params.adapter, "fingerprint": self.adapter}
        return found

    def begin(self, num_steps: int) -> None:
        """Postgres knows that it runs from now on."""
        self.parked = False
        self.began_step = num_steps

    def delta(self, tokens: NewTokens) -> Delta:
        """What a reader of the stream gets."""
        return Delta(
            fence=self.claimed.fence,
            start=tokens.start,
            ids=tokens.ids,
            text=tokens.text,
            logprobs=tokens.logprobs or None,
        )

    def note_token(self) -> None:
        """The engine's thread: a token was made."""
        self.last_token_s = monotonic_s()
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s

    def take(self, tokens: NewTokens) -> None:
        """Adds tokens, to be saved by the next heartbeat; without exactness their reader waits for
        that."""
        self.ids.extend(tokens.ids)
        self.logprobs.extend(tokens.logprobs)
        if not self.exact:
            self.held.append(self.delta(tokens))

    def take_held(self) -> list[Delta]:
        """Deltas that may be published now: all of their tokens are saved."""
        held = self.held
        self.held = []
        return held

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
        """Seconds: waiting before this claim, to this attempt's first token, and in this attempt
        altogether."""
        now_s = monotonic_s()
        timings = {"queued_s": self.claimed.queued_s, "running_s": now_s - self.began_s}
        if self.first_token_s is not None:
            timings["first_token_s"] = self.first_token_s - self.began_s
        return {name: round(value, 6) for name, value in timings.items()}

    def latency(self) -> Latency:
        """Returns it as its caller sees it, once its end is committed."""
        before_s = self.claimed.due_s - self.began_s
        num_resumed = len(self.claimed.output_ids)
        first_s = self.first_token_s
        last_s = self.last_token_s
        num_gaps = len(self.ids) - num_resumed - 1
        return Latency(
            whole_s=before_s + monotonic_s(),
            first_token_s=None if first_s is None or num_resumed else before_s + first_s,
            token_s=None
            if first_s is None or last_s is None or num_gaps < 1
            else (last_s - first_s) / num_gaps,
        )
