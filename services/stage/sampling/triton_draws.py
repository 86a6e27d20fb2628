"""Draws the tokens of many rows in one launch on GPUs, where row by row costs the host some twenty
launches and waits for each.

Owns the launch. Knows no sequence.

Letters of shapes: R rows, V the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.stage.kernels.triton_loader import TritonKernels, unserved
from shardline.contract.job import SamplingParams

KERNELS = "services.stage.sampling.triton_kernels"

NOT_FINITE = -1
NONE_LEFT = -2
NONE_DRAWN = -3
"""What stands for a token: the row is no distribution; every token is excluded; the row needs more
random numbers than it was given."""
NUM_UNIFORMS = 4
"""Random numbers of a row: each proposal halves what is left, or more."""
BLOCK = 2048
LAUNCH = {"num_warps": 8}
"""As they ran on an H200; larger blocks have not."""


@dataclass(frozen=True, slots=True)
class RowDraw:
    """How a row's token is drawn."""

    params: SamplingParams
    uniforms: Sequence[float]
    """In [0, 1), one for each proposal, NUM_UNIFORMS at most."""


class TritonDraws:
    """Launches the kernel. Used by one thread."""

    def __init__(self, log2_e: float, least_temperature: float) -> None:
        """Temperatures count as `least_temperature` at least; `log2_e` turns logits into powers of
        two."""
        self._kernels = TritonKernels.load(KERNELS, __file__)
        self._log2_e = log2_e
        self._least_temperature = least_temperature

    def draw(self, rows: Tensor, draws: Sequence[RowDraw]) -> list[int]:
        """Returns the token of each row of logits float32 [R, V], or what stands for one. Waits for
        it."""
        rows = rows.contiguous()
        num_rows, vocabulary = rows.shape
        params = [each.params for each in draws]
        scales = [self._log2_e / max(each.temperature, self._least_temperature) for each in params]
        numbers = [
            *scales,
            *(each.min_p for each in params),
            *(each.top_p for each in params),
            *(
                uniform
                for each in draws
                for uniform in [*each.uniforms, *[0.0] * (NUM_UNIFORMS - len(each.uniforms))]
            ),
        ]
        given = torch.tensor(numbers, dtype=torch.float64).to(rows.device, non_blocking=True)
        scale, min_p, top_p, uniforms = given.split(
            [num_rows, num_rows, num_rows, num_rows * NUM_UNIFORMS]
        )
        tokens = torch.empty(num_rows, dtype=torch.int32, device=rows.device)
        self._kernels.module.draw[(num_rows,)](
            rows,
            scale.float(),
            _least_logits(rows, [each.top_k for each in params]),
            min_p.float(),
            top_p,
            uniforms,
            tokens,
            VOCABULARY=vocabulary,
            BLOCK=BLOCK,
            NUM_UNIFORMS=NUM_UNIFORMS,
            NOT_FINITE=NOT_FINITE,
            NONE_LEFT=NONE_LEFT,
            NONE_DRAWN=NONE_DRAWN,
            **LAUNCH,
        )
        return [int(token) for token in tokens.tolist()]


def load(device: torch.device, *, log2_e: float, least_temperature: float) -> TritonDraws | None:
    """Returns the launcher for a GPU that triton serves, else None."""
    if device.type == "cpu" or unserved(device) is not None:
        return None
    return TritonDraws(log2_e, least_temperature)


def _least_logits(rows: Tensor, top_k: Sequence[int]) -> Tensor:
    """The smallest logit of each row that its top_k keeps, float32 [R]."""
    vocabulary = rows.shape[1]
    kept = [k if 0 < k < vocabulary else 0 for k in top_k]
    largest = max(kept)
    least = torch.full((len(rows),), -math.inf, device=rows.device)
    if not largest:
        return least
    place = torch.tensor(kept, device=rows.device)
    values = rows.topk(largest, dim=1).values
    found = values.gather(1, (place - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    return torch.where(place > 0, found, least)
