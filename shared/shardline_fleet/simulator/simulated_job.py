"""A job in a simulation: its size, what is known of its tokens, and its moments. Knows no head."""

from __future__ import annotations

from dataclasses import dataclass

from shardline.contract.job import FinishReason, SamplingParams
from shardline_scheduler.sequence import Key, Request


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """Also the token sink of its present attempt: it ends after `output` tokens and makes no
    text."""

    number: int
    prompt: int
    output: int
    arrived_s: float
    num_tokens: int = 0
    """Known to the head that runs it."""
    num_saved: int = 0
    """Of these, by the last heartbeat."""
    attempt: int = 0
    is_suspect: bool = False
    """A head died while it ran without a saved token: it runs as the only such one."""
    first_s: float | None = None
    ended_s: float | None = None
    stalled_s: float | None = None
    """Since when a fault holds it up."""

    @property
    def key(self) -> Key:
        """Returns the key of the present attempt."""
        return str(self.number), self.attempt

    @property
    def text(self) -> str:
        """None is made."""
        return ""

    def push(self, _token_id: int, /) -> tuple[str, FinishReason | None]:
        """One more token."""
        self.num_tokens += 1
        return "", FinishReason.LENGTH if self.num_tokens == self.output else None

    def flush(self) -> str:
        """Nothing is held back."""
        return ""

    def begin(self) -> Request:
        """The next attempt, which goes on from the saved tokens."""
        self.attempt = self.attempt + 1
        self.num_tokens = 0
        return Request(
            key=self.key,
            prompt_ids=(0,) * self.prompt,
            output_ids=(0,) * self.num_saved,
            params=SamplingParams(max_tokens=self.output, temperature=0.0, ignore_eos=True),
            seed=0,
            quarantined=self.is_suspect,
        )
