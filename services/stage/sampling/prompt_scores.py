"""Log-probabilities of a prompt's tokens, from the logits of the rows before them: each depends
on its row alone.

Knows no chunk of another sequence, and draws nothing. Letters of shapes: R scored rows, V the
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shardline.contract.job import PromptLogprob
from shardline_scheduler.step_plan import Open, Row, ScoredTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """The rows of one chunk that are followed by tokens to score."""

    seq: int
    start: int
    """The place in the sequence of the first of them."""
    rows: range
    """Packed ones of the step."""
    ids: tuple[int, ...]
    """The tokens that follow them."""
    num_top: int


class ScoredPrompt:
    """What the tail keeps of an open sequence that wants log-probabilities of its prompt."""

    __slots__ = ("_ids", "_num_scored", "_num_top")

    def __init__(self, record: Open, num_top: int) -> None:
        self._ids = record.ids[: record.num_prompt]
        self._num_scored = record.num_scored
        self._num_top = num_top

    def rows_of(self, row: Row, first: int) -> ScoredRows | None:
        """Returns those of a chunk with the packed rows from `first` on, None if it has none."""
        start = max(row.start, self._num_scored)
        end = min(row.start + row.length, len(self._ids) - 1)
        if start >= end:
            return None
        begin = first + start - row.start
        return ScoredRows(
            seq=row.seq,
            start=start,
            rows=range(begin, begin + end - start),
            ids=self._ids[start + 1 : end + 1],
            num_top=self._num_top,
        )


def scored_prompt(record: Open) -> ScoredPrompt | None:
    """Returns the prompt of a sequence that is opened, None if it is not to be scored."""
    num_top = record.params.prompt_logprobs
    return None if num_top is None else ScoredPrompt(record, num_top)


def score(logits: Tensor, scored: ScoredRows) -> ScoredTokens | None:
    """Returns the log-probabilities of the tokens that follow rows with the logits [R, V], of any
    float dtype; None if one of the rows is not finite."""
    found: list[PromptLogprob] = []
    for each, token_id in zip(logits, scored.ids, strict=True):
        row = each.float()
        # A NaN counts as the largest.
        if not math.isfinite(float(row.max())):
            return None
        found.append(_of_token(row.log_softmax(0), token_id, scored.num_top))
    return ScoredTokens(scored.seq, scored.start, tuple(found))


def _of_token(logprobs: Tensor, token_id: int, num_top: int) -> PromptLogprob:
    values, ids = logprobs.topk(min(num_top, len(logprobs)))
    value = logprobs[token_id]
    top = zip(ids.tolist(), values.tolist(), strict=True)
    rank = 1 + int((logprobs > value).sum())
    return PromptLogprob(token_id, float(value), rank, tuple(top))


def merged_rows(sampled: Sequence[int], scored: Sequence[ScoredRows]) -> list[int]:
    """Returns the packed rows with logits that are wanted, each once, ascending."""
    return sorted({*sampled, *(row for each in scored for row in each.rows)})
