"""The probe of row counts: it sees one changed element in 100,000, where its predecessor saw
nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.stage.products.row_buckets import ROW_BUCKETS, Buckets
from services.stage.products.row_counts import (
    Product,
    Run,
    exact_buckets,
    find_buckets,
    sensitive_rows,
)

WIDTH = 64
ONE_IN = 100_000


def product(
    run: Run, *, width: int = WIDTH, outputs: int = WIDTH, dtype: torch.dtype = torch.float32
) -> Product:
    """A product by this function, with some weight."""
    sample = torch.randn(16, width, generator=torch.Generator().manual_seed(5)).to(dtype)
    return made(run, width=width, outputs=outputs, dtype=dtype, sample=sample)


def made(run: Run, *, width: int, outputs: int, dtype: torch.dtype, sample: Tensor) -> Product:
    """A product that ignores its buckets."""
    return Product(
        run=run,
        use_buckets=lambda _: None,
        width=width,
        outputs=outputs,
        dtype=dtype,
        sample=sample,
        kind="fake",
    )


def spoiled(counts: set[int]) -> Run:
    """Wide rows; of those that come in these numbers one element in 100,000 has another last
    bit."""

    def run(x: Tensor) -> Tensor:
        out = x.repeat(1, 8) * torch.arange(1, 8 * WIDTH + 1)
        if len(x) in counts:
            bits = out.view(torch.int32)
            chosen = (bits.long() * 2_654_435_761 >> 13) % ONE_IN == 0
            bits[chosen] ^= 1
        return out

    return run


def old_rule(run: Run) -> bool:
    """What was tried before: 96 rows as the reference, numbers up to 64, at least 16 rows of
    each."""
    rows = torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(0))
    expected = run(rows)
    for count in (count for count in ROW_BUCKETS if count <= 64):
        for panel in range(-(-16 // count)):
            first = (7 * count + 5 * panel) % (96 - count)
            if not torch.equal(run(rows[first : first + count]), expected[first : first + count]):
                return False
    return True


@pytest.mark.parametrize(
    "bad",
    [{2, 4, 8}, {32}, {120}, {192, 224, 256}, {512}, set(ROW_BUCKETS) - {64}],
    ids=lambda bad: str(sorted(bad)),
)
def test_row_counts_that_change_one_element_in_100_000_are_left_out(bad: set[int]) -> None:
    run = spoiled(bad)
    assert old_rule(run), "its predecessor would have allowed all of them"

    assert exact_buckets(product(run, outputs=8 * WIDTH)) == tuple(
        count for count in ROW_BUCKETS if count not in bad
    )


def test_no_count_fits_rows_that_depend_on_their_place() -> None:
    def knows_its_offset(x: Tensor) -> Tensor:
        return x + (torch.arange(len(x)) == 5)[:, None]

    assert exact_buckets(product(knows_its_offset)) == ()


def test_each_of_several_outputs_is_compared() -> None:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x[:, :1] + (len(x) < 40)

    several = made(run, width=8, outputs=8, dtype=torch.float32, sample=torch.randn(2, 8))

    assert exact_buckets(several) == tuple(count for count in ROW_BUCKETS if count >= 40)


def test_telling_rows_show_another_order_of_summation_far_more_often() -> None:
    # Given one weight, and its product in bfloat16 summed in two orders
    width = 512
    outputs = 192
    generator = torch.Generator().manual_seed(2)
    weight = (torch.randn(outputs, width, generator=generator) * 0.05).bfloat16()
    tried = made(
        lambda x: x, width=width, outputs=outputs, dtype=torch.bfloat16, sample=weight[:16]
    )

    def share_that_differs(rows: Tensor) -> float:
        x = rows.float()
        w = weight[:16].float()
        whole = sum((x[:, k, None] * w[:, k] for k in range(1, width)), x[:, 0, None] * w[:, 0])
        halves = [
            sum(
                (x[:, k, None] * w[:, k] for k in range(first + 1, first + 256)),
                x[:, first, None] * w[:, first],
            )
            for first in (0, 256)
        ]
        return float((whole.bfloat16() != (halves[0] + halves[1]).bfloat16()).float().mean())

    # When rows are drawn at random, and so that they are sensitive
    usual = share_that_differs(torch.randn(4096, width, generator=generator).bfloat16())
    sensitive = share_that_differs(sensitive_rows(tried, 4096))

    # Then the second show what the first nearly hide
    assert 0 < 100 * usual < sensitive


def test_nothing_is_probed_again_with_an_answer_on_disk(tmp_path: Path) -> None:
    tries: list[int] = []

    def run(x: Tensor) -> Tensor:
        tries.append(len(x))
        return x + (len(x) > 160)

    first = buckets_of(product(run), "here", tmp_path)
    num_tries = len(tries)

    assert first == tuple(count for count in ROW_BUCKETS if count <= 160)
    assert buckets_of(product(run), "here", tmp_path) == first
    assert len(tries) == num_tries
    assert buckets_of(product(run), "elsewhere", tmp_path) == first
    assert len(tries) == 2 * num_tries


@pytest.mark.parametrize("text", ["", "[", "[40, 41]", "[2, 4]", "3", "{}"])
def test_an_answer_written_by_another_version_is_probed_again(text: str, tmp_path: Path) -> None:
    buckets_of(product(lambda x: x), "here", tmp_path)
    (stored,) = tmp_path.iterdir()
    stored.write_text(text)

    assert buckets_of(product(lambda x: x), "here", tmp_path) == ROW_BUCKETS


def test_products_that_agree_on_other_counts_have_their_own(tmp_path: Path) -> None:
    few = product(lambda x: x + (len(x) < 40), outputs=64)
    many = product(lambda x: x + (len(x) > 160), outputs=65)

    found = find_buckets([few, many], machine="here", cache_folder=tmp_path)

    assert found[few] == tuple(count for count in ROW_BUCKETS if count >= 40)
    assert found[many] == tuple(count for count in ROW_BUCKETS if count <= 160)


def buckets_of(one: Product, machine: str, cache_folder: Path) -> Buckets:
    """The buckets found for one product."""
    return find_buckets([one], machine=machine, cache_folder=cache_folder)[one]
