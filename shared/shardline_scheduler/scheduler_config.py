"""What the scheduler gets from its pipeline and its settings, and which requests can therefore
never run."""

from __future__ import annotations

from dataclasses import dataclass

from shardline_scheduler.offload import NO_OFFLOAD, OffloadTerms
from shardline_scheduler.sequence import Request
from shardline_scheduler.step_plan import unsendable


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """`num_blocks` is the minimum over stages, `max_len` the context length, `num_lanes` the steps
    in flight."""

    num_blocks: int
    max_seats: int
    token_budget: int
    num_lanes: int
    max_len: int
    num_stages: int | None = None
    """None: one for each lane. More lanes keep stages busy while frames are on links."""
    prefix_cache: bool = True
    prompt_lookup: int = 0
    """Rows of a step up to which its decodes are given drafts."""
    offload: OffloadTerms = NO_OFFLOAD
    """Needs the prefix cache: a block that comes back is found as one that was there."""
    max_adapters: int = 1
    """Adapters of open sequences."""
    pools: bool = False
    """Sequences become vectors instead of tokens: each is one row of one step, and ends with it."""
    num_states: int = 0
    """Recurrent states that the stages hold, of open sequences and as snapshots; 0: no layer has
    one. A state is not taken back: there is neither prompt lookup nor offload."""

    def __post_init__(self) -> None:
        assert (
            min(self.max_seats, self.token_budget, self.num_lanes, self.max_len, self.max_adapters)
            >= 1
        ), self
        assert not self.pools or self.max_len <= self.token_budget, self

    @property
    def is_recurrent(self) -> bool:
        """Whether sequences have a recurrent state."""
        return self.num_states > 0

    @property
    def most_running(self) -> int:
        """Returns the most sequences that can have a seat."""
        return min(self.max_seats, self.num_states) if self.is_recurrent else self.max_seats

    def refusal(self, request: Request) -> str | None:
        """Why a request can never run here."""
        num_prompt = len(request.prompt_ids)
        if self.pools and not 0 < num_prompt <= self.max_len:
            return f"prompt: {num_prompt} tokens; it must be 1 to {self.max_len}"
        if not self.pools and not 0 < num_prompt < self.max_len:
            return (
                f"prompt: {num_prompt} tokens; it must be 1 to {self.max_len - 1}, "
                "the context less one"
            )
        return request.refusal or unsendable(request.params, request.seed)
