"""Which tokens of one sequence are favored, allowed and banned by its request: a bias, a list of
ids, and words.

Knows no penalty, no grammar and no other sequence.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shardline_scheduler.step_plan import Open


class TokenLimits:
    """Changes logits by `logit_bias`, `allowed_token_ids` and `bad_words`: a function of the
    request and of the last output tokens. `extend` it with each of these.

    Ids beyond the vocabulary, which no door lets pass, count for nothing.
    """

    __slots__ = ("_banned", "_bias", "_biased", "_forbidden", "_last")

    def __init__(self, record: Open, *, vocab_size: int, device: torch.device) -> None:
        params = record.params
        bias = {token: value for token, value in params.logit_bias.items() if token < vocab_size}
        self._biased = torch.tensor([*bias], dtype=torch.long, device=device)
        self._bias = torch.tensor([*bias.values()], dtype=torch.float32, device=device)
        self._forbidden: Tensor | None = None
        """True for each token that is not allowed, bool [V]."""
        if params.allowed_token_ids is not None:
            allowed = [token for token in params.allowed_token_ids if token < vocab_size]
            self._forbidden = torch.ones(vocab_size, dtype=torch.bool, device=device)
            self._forbidden[allowed] = False
        self._banned = [ids for ids in record.banned if ids and ids[-1] < vocab_size]
        longest = max(map(len, self._banned), default=1)
        self._last: deque[int] = deque(maxlen=longest - 1)
        """As many of the last output tokens as a ban depends on."""

    def extend(self, ids: Iterable[int]) -> None:
        """Adds output tokens."""
        self._last.extend(ids)

    def biased(self, row: Tensor) -> Tensor:
        """Returns the logits [V], float32, with the bias. The given row is not changed."""
        return row.index_add(0, self._biased, self._bias) if len(self._biased) else row

    def masked(self, row: Tensor) -> Tensor:
        """Returns the logits [V], float32, with minus infinity at each token that must not be next.
        The given row is not changed."""
        if self._forbidden is not None:
            row = row.masked_fill(self._forbidden, -math.inf)
        ended = self._ends_of_bans()
        if ended:
            row = row.clone()
            row[ended] = -math.inf
        return row

    def _ends_of_bans(self) -> list[int]:
        """The tokens that would complete a banned sequence."""
        last = tuple(self._last)
        return [ids[-1] for ids in self._banned if _ends_with(last, ids[:-1])]


def _ends_with(last: Sequence[int], ids: Sequence[int]) -> bool:
    return len(ids) <= len(last) and last[len(last) - len(ids) :] == ids


def limits_of(record: Open, *, vocab_size: int, device: torch.device) -> TokenLimits | None:
    """Returns the limits that a sequence asks for, None if there are none."""
    params = record.params
    if not (params.logit_bias or record.banned) and params.allowed_token_ids is None:
        return None
    return TokenLimits(record, vocab_size=vocab_size, device=device)
