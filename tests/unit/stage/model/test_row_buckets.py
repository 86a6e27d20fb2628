"""Numbers of rows: how they are padded, cut into panels, and put together again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.stage.model.row_buckets import RUNGS, Ladder, Panels, cut, in_panels

AMX = (40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
"""Numbers that agree on some processor: with a floor and a ceiling."""
GAPS = (40, 48, 56, 64, 80, 112, 128)
WIDE = tuple(rung for rung in RUNGS if 40 <= rung <= 448)


@pytest.mark.parametrize(
    ("num_rows", "width", "num_threads", "expected"),
    [
        (1, 64, 1, 2),  # the fewest rows
        (17, 64, 1, 24),  # the next rung
        (5, 4, 1, 16),  # 16 x 4 is a whole vector, 8 x 4 is not
        (33, 1000, 2, 48),  # two runs, each whole
        (40, 1536, 2, 40),
        (200, 512, 3, 240),  # three runs
        (257, 64, 1, 258),  # 256 and 2
    ],
)
def test_every_padded_run_is_whole(num_rows: int, width: int, num_threads: int, expected: int) -> None:
    panels = Panels(widths=frozenset({width}), num_threads=num_threads)

    assert panels.padded(num_rows) == expected
    assert panels.is_whole(expected)


def test_silu_of_padded_rows_does_not_depend_on_their_number() -> None:
    x = torch.randn(600, 48, generator=torch.Generator().manual_seed(3))
    whole = torch.nn.functional.silu(x[:576])
    panels = Panels(widths=frozenset({48}), num_threads=torch.get_num_threads())

    for num_rows in range(1, 500, 7):
        padded = panels.padded(num_rows)
        assert torch.equal(torch.nn.functional.silu(x[:padded])[:num_rows], whole[:num_rows]), num_rows


def test_runs_are_not_whole_for_widths_that_threads_cannot_share() -> None:
    assert Panels(widths=frozenset({1024, 2816}), num_threads=4).are_whole(512)
    assert not Panels(widths=frozenset({32_769}), num_threads=1009).are_whole(512)


@pytest.mark.parametrize(
    "ladders",
    [(RUNGS,), (AMX,), (GAPS,), ((64,),), (AMX, RUNGS), (GAPS, WIDE, RUNGS)],
    ids=["all", "floor and ceiling", "gaps", "one", "two products", "three products"],
)
def test_rows_are_cut_into_few_allowed_panels(ladders: tuple[Ladder, ...]) -> None:
    for num_rows in range(1, 1200):
        padded = Panels(ladders=frozenset(ladders)).padded(num_rows)
        for ladder in ladders:
            panels = cut(padded, ladder)

            assert sum(panels) == padded >= num_rows
            assert set(panels) <= set(ladder)
            assert len(panels) <= -(-padded // ladder[-1]) + 1
        fewest = max(ladder[0] for ladder in ladders)
        assert padded - num_rows < max(fewest, 64), "what is added stays below a panel"


def test_one_panel_holds_a_full_prefill() -> None:
    assert cut(512, RUNGS) == (512,)
    assert cut(400, RUNGS) == (208, 192), "not padded to 448"


def test_rows_as_they_come_are_not_cut() -> None:
    assert cut(1234, ()) == (1234,)
    assert Panels(ladders=frozenset()).padded(1) == 1


@pytest.mark.parametrize("num_rows", [1, 40, 41, 160, 161, 500])
@pytest.mark.parametrize("shape", [(), (1,)], ids=["rows", "one batch of rows"])
def test_rows_run_in_panels_come_back_in_order(num_rows: int, shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, num_rows, 6, generator=torch.Generator().manual_seed(1))
    seen: list[int] = []

    def run(part: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(part.shape[-2])
        return part * 2, part[..., :1]

    doubled, first = in_panels(run, x, AMX)

    assert torch.equal(doubled, x * 2)
    assert torch.equal(first, x[..., :1])
    assert set(seen) <= set(AMX)
    assert torch.equal(in_panels(lambda part: part + 1, x, AMX), x + 1)
