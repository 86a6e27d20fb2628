"""Adapters within the call of a product: right beside float64, and each row with its bits whatever
runs beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from services.stage.adapters.adapted_products import AdaptedProducts, OutputPlace, RankTable
from services.stage.kernels.kernel import Weights
from services.stage.products.tiled_linear import TiledLinear
from tests.unit.stage.attention.attending import all_kernels

KINDS = [(kernel, weights) for kernel in all_kernels() for weights in Weights]
IDS = [f"{kernel.isa}-{weights.name.lower()}" for kernel, weights in KINDS]
WIDTH = 77
NUM_ROWS = 300
LAYERS = {"a": slice(0, 20), "b": slice(20, 53)}
"""Linear layers side by side: the outputs of each."""
ADAPTERS: tuple[dict[str, int], ...] = ({"a": 4, "b": 9}, {"b": 33}, {})
"""Layers and ranks of each. The last adds nothing to this product."""
ROWS = [torch.arange(place, NUM_ROWS, 4) for place in range(3)]
"""Of each adapter; every fourth row has none."""


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


class Adapted(NamedTuple):
    """A product with adapters, and the weights of these."""

    product: TiledLinear
    products: AdaptedProducts
    weights: Sequence[dict[str, tuple[Tensor, Tensor]]]
    layers: Sequence[dict[str, tuple[TiledLinear, TiledLinear]]]
    tables: Sequence[RankTable]

    def outputs(self, x: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """Of all rows, some of which have adapters."""
        self.products.use(list(zip(self.tables, rows, strict=True)))
        out = self.product(x)
        self.products.use(())
        return out


def drawn(seed: int, *shape: int) -> Tensor:
    """Random values that bfloat16 holds."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def adapted(kind: int) -> Adapted:
    """By KINDS[kind]."""
    kernel, weights = KINDS[kind]
    own = Weights.FLOAT32 if weights is Weights.FLOAT32 else Weights.BFLOAT16
    product = TiledLinear(kernel, drawn(1, 53, WIDTH), drawn(2, 53), weights)
    products = AdaptedProducts(
        {name: OutputPlace(product, outputs.start) for name, outputs in LAYERS.items()}
    )
    pairs = [
        {
            name: (
                drawn(rank, rank, WIDTH),
                drawn(rank + 1, LAYERS[name].stop - LAYERS[name].start, rank),
            )
            for name, rank in adapter.items()
        }
        for adapter in ADAPTERS
    ]
    layers = [
        {
            name: (TiledLinear(kernel, down, None, own), TiledLinear(kernel, up, None, own))
            for name, (down, up) in each.items()
        }
        for each in pairs
    ]
    return Adapted(product, products, pairs, layers, [products.table(each) for each in layers])


def rows_of(kind: int) -> Tensor:
    """Inputs of KINDS[kind]."""
    return drawn(3, NUM_ROWS, WIDTH).to(
        torch.float32 if KINDS[kind][1] is Weights.FLOAT32 else torch.bfloat16
    )


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=IDS)
def test_adapters_add_their_products_to_their_rows_and_outputs(kind: int) -> None:
    # Given what the product gives without
    x = rows_of(kind)
    made = adapted(kind)
    plain = made.product(x)
    expected = plain.double()
    size = plain.double().abs()
    for pairs, rows in zip(made.weights, ROWS, strict=True):
        for name, (down, up) in pairs.items():
            at = (rows.long(), LAYERS[name])
            inputs = x[rows.long()].double()
            expected[at] += inputs @ down.double().T @ up.double().T
            size[at] += inputs.abs() @ down.double().T.abs() @ up.double().T.abs()

    # When adapters add to some rows
    got = made.outputs(x, ROWS)

    # Then each has its own, but for roundings; rows of the adapter without layers here, and of
    # none, keep their bits
    assert ((got.double() - expected).abs() <= 2 * torch.finfo(x.dtype).eps * size).all()
    assert torch.equal(got[3::4], plain[3::4])
    assert torch.equal(got[2::4], plain[2::4])
    assert torch.equal(made.product(x), plain)


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=IDS)
def test_a_row_with_an_adapter_keeps_its_bits_whatever_runs_beside_it(kind: int) -> None:
    # Given each row alone
    x = rows_of(kind)
    made = adapted(kind)
    first = torch.zeros(1)
    none = torch.empty(0)
    torch.set_num_threads(1)
    alone = torch.cat(
        [
            made.outputs(
                row[None], [first if place % 4 == adapter else none for adapter in range(3)]
            )
            for place, row in enumerate(x)
        ]
    )

    # When all run together, or one adapter has every row, on one thread or two
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(made.outputs(x, ROWS), alone)
        every = torch.arange(NUM_ROWS)
        assert torch.equal(made.outputs(x, [every, none, none])[::4], alone[::4])


def test_a_product_of_fewer_rows_than_adapters_have_is_refused() -> None:
    x = rows_of(0)
    made = adapted(0)
    with pytest.raises(AssertionError):
        made.outputs(x[:200], ROWS)
