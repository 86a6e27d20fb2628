"""What a step costs whatever its tokens, and what one more of them costs, learned from steps. Tells
whether KV is worth its copy. Reads no clock."""

from __future__ import annotations

from shardline_scheduler.kv_blocks import BLOCK_TOKENS

SHARE = 1 / 64
"""Of the newest step in what is known: some 64 steps count."""
MIN_VARIANCE = 64.0
"""Of steps' tokens: from steps of a few tokens, more or less, only noise could be learned."""


class StepCost:
    """The line of a step's time over its tokens: weights stream through once for all of them, so
    one more costs the slope, not the mean."""

    __slots__ = ("_covariance", "_mean_s", "_mean_tokens", "_num_steps", "_variance", "token_s")

    def __init__(self) -> None:
        self._num_steps = 0
        self._mean_tokens = self._mean_s = self._variance = self._covariance = 0.0
        self.token_s: float | None = None
        """Seconds for one more token in a step; None until steps of unlike sizes were seen."""

    def learn(self, num_tokens: int, compute_s: float) -> None:
        """One step: its packed rows, and the time that they took."""
        self._num_steps += 1
        share = max(SHARE, 1 / self._num_steps)
        tokens_off = num_tokens - self._mean_tokens
        off_s = compute_s - self._mean_s
        self._mean_tokens += share * tokens_off
        self._mean_s += share * off_s
        self._variance = (1 - share) * (self._variance + share * tokens_off * tokens_off)
        self._covariance = (1 - share) * (self._covariance + share * tokens_off * off_s)
        if self._variance >= MIN_VARIANCE:  # else it stays: a long answer has steps of one token
            self.token_s = self._covariance / self._variance

    @property
    def fixed_tokens(self) -> float | None:
        """The number of tokens that cost as much as a step does whatever its tokens; None until
        that is known."""
        if self.token_s is None or self.token_s <= 0:
            return None
        return max(0.0, self._mean_s / self.token_s - self._mean_tokens)

    def is_above(self, move_s: float) -> bool:
        """Whether a block is copied out and back, in `move_s`, sooner than it is computed again.

        Yes while nothing is known: only on a slow disk is a copy the dearer one.
        """
        return self.token_s is None or move_s < BLOCK_TOKENS * self.token_s
