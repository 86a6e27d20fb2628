"""Keys and values that are not finite: they reach the rows that see them, and no other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from services.stage.attention.triton_backend import TritonBackend
from services.stage.kernels.kernel import Kernel
from tests.unit.stage.attention.attending import Case, attend, kernels

BACKENDS: list[Kernel | TritonBackend | None] = [*kernels(), TritonBackend(), None]
NAMES = [*(kernel.isa for kernel in kernels()), "triton", "sdpa"]
LENGTH = 100
ODD = 68
CHUNKS = (65, 35)
"""Tokens of the sequence, the one that is not finite, and chunks in which it is amid the rows of a
tile."""
WINDOW = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class OddCase(Case):
    """One token of the first sequence is not finite, in one number of its value or of its key."""

    odd: float
    part: int

    def rows(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Query [H, n, D], key and value [Hk, n, D] of each sequence."""
        rows = Case.rows(self)
        rows[0][self.part][:, ODD, 3] = self.odd
        return rows


@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("part", "odd"), [(1, float("nan")), (2, float("inf"))], ids=["key", "value"]
)
@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": WINDOW}, {"softcap": 5.0, "s_aux": torch.ones(3)}],
    ids=["plain", "window", "sinks"],
)
def test_a_token_that_is_not_finite_reaches_only_rows_that_see_it(
    backend: Any, dtype: torch.dtype, part: int, odd: float, options: dict[str, Any]
) -> None:
    shape: dict[str, Any] = {
        "lengths": [LENGTH, 20],
        "num_kv_heads": 1,
        "group": 3,
        "head_dim": 32,
        "dtype": dtype,
    }
    expected = attend(backend, Case(**shape, options=options), CHUNKS)

    first, second = attend(backend, OddCase(**shape, options=options, odd=odd, part=part), CHUNKS)

    assert torch.equal(first[:ODD], expected[0][:ODD])
    assert torch.equal(second, expected[1])
    assert not first[ODD : ODD + WINDOW].isfinite().all(-1).any()


@pytest.mark.parametrize("kernel", kernels(), ids=lambda kernel: kernel.isa)
@pytest.mark.parametrize("options", [{}, {"sliding_window": WINDOW}], ids=["plain", "window"])
def test_rows_that_see_it_have_the_same_bits_in_any_chunks(
    kernel: Kernel, options: dict[str, Any]
) -> None:
    case = OddCase(
        lengths=[LENGTH], group=3, head_dim=32, options=options, odd=float("inf"), part=2
    )
    whole, chunked = (attend(kernel, case, chunks)[0] for chunks in ([LENGTH], CHUNKS))
    assert torch.equal(whole.isnan(), chunked.isnan())
    assert torch.equal(whole.nan_to_num(), chunked.nan_to_num())
