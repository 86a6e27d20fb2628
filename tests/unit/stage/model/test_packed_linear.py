"""Packed linears: rows whose bits do not depend on their number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from services.stage.model.packed_linear import PackedLinear
from services.stage.model.products import products
from services.stage.model.row_counts import find_buckets

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Thousands of small products: threads would wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_rows_of_a_packed_layer_keep_their_bits_whatever_their_number(dtype: torch.dtype, tmp_path: Path) -> None:
    # Given a layer whose sums are long, told which numbers of rows agree
    torch.manual_seed(0)
    layer = nn.Linear(512, 192).to(dtype)
    model = PackedLinear(layer.weight, layer.bias)
    (product,), are_all = products(model)
    assert are_all
    buckets = find_buckets([product], machine="here", cache_folder=tmp_path)[product]
    product.use_buckets(buckets)

    # When any number of rows runs, then each row has the bits that it has alone
    assert buckets
    rows = torch.randn(700, 512).to(dtype)
    expected = torch.cat([model(rows[index : index + 1]) for index in range(0, 700, 7)])
    for num in (2, 9, 33, 95, 191, 260, 513, 695):
        assert torch.equal(model(rows[:num])[::7], expected[: -(-num // 7)]), num
    assert torch.equal(model(rows[None, :260])[0], model(rows)[:260])


@torch.inference_mode()
def test_plain_layers_and_routers_see_only_the_rows_that_they_are_told() -> None:
    # Given a plain layer, one stored the other way round, and a router, each of which would note the rows that it sees
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8))

        def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
            seen.append(len(states))
            chances, experts = (states @ self.weight.T).softmax(-1).topk(2)
            return chances, experts

    seen: list[int] = []
    model = nn.ModuleDict({"plain": nn.Linear(8, 5), "other": Conv1D(6, 8), "router": Router()})
    x = torch.randn(1, 200, 8)
    expected = model["plain"](x), model["other"](x), model["router"](x[0])
    found, are_all = products(model)
    assert are_all
    assert {(one.width, one.outputs) for one in found} == {(8, 5), (8, 6), (8, 4)}
    for layer in (model["plain"], model["other"]):
        layer.forward = _noting(layer.forward, seen)
    seen.clear()

    # When they get their buckets
    for one in found:
        one.use_buckets((64,))
    got = model["plain"](x), model["other"](x), model["router"](x[0])

    # Then they give the same, in panels
    assert set(seen) == {64}
    torch.testing.assert_close(got, expected)


def test_a_weight_of_an_unknown_kind_is_not_exact() -> None:
    model = nn.Module()
    model.experts = nn.Parameter(torch.zeros(2, 3, 4))

    assert products(model) == ([], False)


def _noting(run: Callable[[Tensor], Tensor], seen: list[int]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        seen.append(x.shape[-2])
        return run(x)

    return forward
