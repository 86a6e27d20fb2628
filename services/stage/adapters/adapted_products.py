"""Products of our own to which adapters add, within the same call: each for its own rows. Knows no
model and no file.

Letters of shapes: T rows with one adapter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from ctypes import addressof, c_int32, pointer
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor, nn

from services.stage.kernels.kernel import AdapterRows, AdapterStep, LowRankPart
from services.stage.model.split_layers import GatheredLinear
from services.stage.products.packing import Part
from services.stage.products.tiled_linear import TiledLinear


class OutputPlace(NamedTuple):
    """Tells which product computes a linear layer, from which of its outputs on."""

    product: TiledLinear
    first_output: int


class RankTable:
    """What an adapter adds to products, as the kernel reads it. Lives as long as the layers that it
    was made of."""

    def __init__(self, by_product: Sequence[Sequence[LowRankPart]]) -> None:
        """Takes what is added to each product, in the order of their numbers."""
        parts = [part for parts in by_product for part in parts]
        self.parts = (LowRankPart * len(parts))(*parts)
        self.begins = (c_int32 * (len(by_product) + 1))(0, *accumulate(map(len, by_product)))


class AdaptedProducts:
    """All products of a shard that adapters may add to. Used by the thread that runs steps."""

    def __init__(self, places: Mapping[str, OutputPlace]) -> None:
        """Takes the place of each linear layer by its name."""
        self._places = places
        self._step = AdapterStep()
        self._numbers: dict[TiledLinear, int] = {}
        self._rows: list[Tensor] = []
        """int32, which the kernel reads."""
        for product, _ in places.values():
            product.call.number = self._numbers.setdefault(product, len(self._numbers))
            product.call.adapters = pointer(self._step)

    def table(self, layers: Mapping[str, tuple[object, object]]) -> RankTable:
        """Returns what an adapter adds of these layers, down and up for each name, both packed as
        products are."""
        by_product: dict[int, list[LowRankPart]] = defaultdict(list)
        for name, (down, up) in layers.items():
            assert isinstance(down, TiledLinear), name
            assert isinstance(up, TiledLinear), name
            product, first_output = self._places[name]
            by_product[self._numbers[product]].append(
                LowRankPart(addressof(down.call), addressof(up.call), first_output)
            )
        return RankTable([by_product[number] for number in range(len(self._numbers))])

    def use(self, groups: Sequence[tuple[RankTable, Tensor]]) -> None:
        """Makes products add these adapters, each to its rows: indices int64 [T], ascending."""
        self._rows = [rows.int() for _, rows in groups]
        found = [
            AdapterRows(table.parts, table.begins, rows.data_ptr(), len(rows))
            for (table, _), rows in zip(groups, self._rows, strict=True)
        ]
        self._step.groups = (AdapterRows * len(found))(*found)
        self._step.num_groups = len(found)


def place_of(layer: nn.Module) -> OutputPlace | None:
    """Returns where a packed linear layer is computed; None: not by a product of ours."""
    if isinstance(layer, GatheredLinear):
        return place_of(layer.linear)
    product, first_output = (
        (layer.merged.layer, layer.first_output) if isinstance(layer, Part) else (layer, 0)
    )
    return OutputPlace(product, first_output) if isinstance(product, TiledLinear) else None
