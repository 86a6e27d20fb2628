"""Numbers of rows: how they are padded, cut into panels, and put together again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.stage.products.row_buckets import (
    ROW_BUCKETS,
    Buckets,
    RowPadding,
    in_panels,
    panel_sizes,
)

AMX = (40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
"""Numbers that agree on some processor: with a floor and a ceiling."""
GAPS = (40, 48, 56, 64, 80, 112, 128)
WIDE = tuple(rows for rows in ROW_BUCKETS if 40 <= rows <= 448)


@pytest.mark.parametrize(
    ("num_rows", "width", "num_threads", "expected"),
    [
        (1, 64, 1, 2),  # the fewest rows
        (17, 64, 1, 24),  # the next bucket
        (5, 4, 1, 16),  # 16 x 4 is a whole vector, 8 x 4 is not
        (33, 1000, 2, 48),  # two threads' shares, each whole
        (40, 1536, 2, 40),
        (200, 512, 3, 240),  # three shares
        (257, 64, 1, 258),  # 256 and 2
    ],
)
def test_every_padded_share_is_whole(
    num_rows: int, width: int, num_threads: int, expected: int
) -> None:
    padding = RowPadding(widths=frozenset({width}), num_threads=num_threads)

    assert padding.padded(num_rows) == expected
    assert padding.is_whole(expected)


def test_silu_of_padded_rows_does_not_depend_on_their_number() -> None:
    x = torch.randn(600, 48, generator=torch.Generator().manual_seed(3))
    whole = torch.nn.functional.silu(x[:576])
    padding = RowPadding(widths=frozenset({48}), num_threads=torch.get_num_threads())

    for num_rows in range(1, 500, 7):
        padded = padding.padded(num_rows)
        assert torch.equal(torch.nn.functional.silu(x[:padded])[:num_rows], whole[:num_rows]), (
            num_rows
        )


def test_shares_are_not_whole_for_widths_that_threads_cannot_share() -> None:
    assert RowPadding(widths=frozenset({1024, 2816}), num_threads=4).are_whole(512)
    assert not RowPadding(widths=frozenset({32_769}), num_threads=1009).are_whole(512)


@pytest.mark.parametrize(
    "all_buckets",
    [(ROW_BUCKETS,), (AMX,), (GAPS,), ((64,),), (AMX, ROW_BUCKETS), (GAPS, WIDE, ROW_BUCKETS)],
    ids=["all", "floor and ceiling", "gaps", "one", "two products", "three products"],
)
def test_rows_are_cut_into_few_allowed_panels(all_buckets: tuple[Buckets, ...]) -> None:
    for num_rows in range(1, 1200):
        padded = RowPadding(buckets=frozenset(all_buckets)).padded(num_rows)
        for buckets in all_buckets:
            panels = panel_sizes(padded, buckets)

            assert sum(panels) == padded >= num_rows
            assert set(panels) <= set(buckets)
            assert len(panels) <= -(-padded // buckets[-1]) + 1
        fewest = max(buckets[0] for buckets in all_buckets)
        assert padded - num_rows < max(fewest, 64), "what is added stays below a panel"


def test_one_panel_holds_a_full_prefill() -> None:
    assert panel_sizes(512, ROW_BUCKETS) == (512,)
    assert panel_sizes(400, ROW_BUCKETS) == (208, 192), "not padded to 448"


def test_rows_as_they_come_are_not_cut() -> None:
    assert panel_sizes(1234, ()) == (1234,)
    assert RowPadding(buckets=frozenset()).padded(1) == 1


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
