"""Chooses the rows for which a GPU draws tokens in one launch, before sequences take them.

Letters of shapes: R rows, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from services.stage.sampling.sampled_sequence import SampledSequence
from services.stage.sampling.triton_draws import NONE_DRAWN, NUM_UNIFORMS, RowDraw, TritonDraws
from services.stage.sampling.uniform import uniform


def draw_ahead(
    draws: TritonDraws,
    rows: Tensor,
    best: Sequence[int],
    sequences: Sequence[SampledSequence],
    starts: Sequence[int],
) -> list[int]:
    """Returns the token of each row of logits float32 [R, V], or what stands for one; NONE_DRAWN
    where none is drawn, or not yet.

    The rows of a sequence lie between two numbers of `starts`; `best` is negative for a row that is
    no distribution. A row behind a draft waits if logits change with each token.
    """
    found = [NONE_DRAWN] * len(rows)
    places: list[int] = []
    adjusted: dict[int, Tensor] = {}
    wanted: list[RowDraw] = []
    for sequence, (start, end) in zip(sequences, pairwise(starts), strict=True):
        params = sequence.params
        if params.temperature == 0 or sequence.labels:
            continue
        is_adjusted = sequence.is_adjusted
        for place in range(start, start + 1 if is_adjusted else end):
            if best[place] < 0:
                break
            if is_adjusted:
                adjusted[len(places)] = sequence.adjusted(rows[place])
            index = sequence.index + place - start
            num = NUM_UNIFORMS if params.top_p < 1.0 else 1
            uniforms = [uniform(sequence.seed, index, proposal) for proposal in range(num)]
            places.append(place)
            wanted.append(RowDraw(params, uniforms))
    if not places:
        return found
    chosen = rows if len(places) == len(rows) and not adjusted else rows[places]
    for number, row in adjusted.items():
        chosen[number] = row
    for place, token in zip(places, draws.draw(chosen, wanted), strict=True):
        found[place] = token
    return found
