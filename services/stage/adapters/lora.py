"""Adapters on a loaded shard: what they add to the outputs of its linear layers, each for some rows
alone.

Our own products on the CPU add it within their call (`adapted_products`), whole layers as one call
too. Of other layers hooks do. A row's bits depend on that row and its adapter only, where the
products keep that promise: see `packing`. Knows no sequence.

Letters of shapes: T packed rows, K inputs and N outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

from services.stage.adapters.adapted_products import AdaptedProducts, RankTable, place_of
from services.stage.adapters.peft import DOWN, UP, Adapter, tensor_names
from services.stage.model.shard import Shard
from services.stage.products.packing import Packing

Product = Callable[[Tensor], Tensor]
"""A linear layer without bias."""


class LoadedLayer(NamedTuple):
    """What an adapter adds to a linear layer: up(down(x)), rows [T, K] to [T, N] in the shard's
    dtype."""

    down: Product
    up: Product
    """Scaled as the adapter is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """The layers of an adapter that a shard holds, by their names in the model."""

    layers: Mapping[str, LoadedLayer]
    table: RankTable
    """Those that our own products compute."""


class AdaptedRows(NamedTuple):
    """Packed rows with one adapter: their indices, ascending, int64 [T]."""

    adapter: LoadedAdapter
    rows: Tensor


class ShardAdapters:
    """Loads adapters for a packed shard, and adds them within `adding`. Used by the thread that
    runs steps."""

    def __init__(self, shard: Shard, packing: Packing) -> None:
        """Packs products by `packing`; without it torch computes them."""
        self.layers = shard.layers
        self._shard = shard
        self._packing = packing
        self._modules = {
            name: each for name, each in shard.model.named_modules() if name in shard.linear_sizes
        }
        self._places = {
            name: place
            for name, each in self._modules.items()
            if (place := place_of(each)) is not None
        }
        self._products = AdaptedProducts(self._places)
        self._groups: Sequence[AdaptedRows] = ()
        self._is_hooked = False

    def load(self, adapter: Adapter) -> LoadedAdapter:
        """Returns the adapter's layers that this shard holds. Raises OSError and
        SafetensorError."""
        if not self._is_hooked:
            self._hook()
        with safe_open(adapter.weights, framework="pt") as file:
            names = tensor_names(file.keys())
            layers = {
                name: LoadedLayer(
                    down=self._product(file.get_tensor(names[name, DOWN]), 1.0),
                    up=self._product(
                        self._share(name, file.get_tensor(names[name, UP])), layer.scale
                    ),
                )
                for name, layer in adapter.layers.items()
                if name in self._modules
            }
        of_products = {name: layer for name, layer in layers.items() if name in self._places}
        return LoadedAdapter(layers=layers, table=self._products.table(of_products))

    @contextmanager
    def adding(self, groups: Sequence[AdaptedRows]) -> Iterator[None]:
        """A context in which forwards of packed rows add these adapters."""
        self._use(groups)
        try:
            yield
        finally:
            self._use(())

    def narrow(self, rows: Tensor) -> None:
        """The forward goes on with these of its packed rows alone, int64 [R]."""
        self._use(
            [
                AdaptedRows(adapter, torch.isin(rows, its).nonzero().flatten())
                for adapter, its in self._groups
            ]
        )

    def _use(self, groups: Sequence[AdaptedRows]) -> None:
        self._groups = [
            AdaptedRows(adapter, rows.to(self._shard.device)) for adapter, rows in groups
        ]
        if self._places:
            self._products.use([(adapter.table, rows) for adapter, rows in groups])

    def _hook(self) -> None:
        """A shard that never sees an adapter calls no hook."""
        for name in self._modules.keys() - self._places.keys():
            self._modules[name].register_forward_hook(partial(self._add, name))
        self._is_hooked = True

    def _share(self, name: str, up: Tensor) -> Tensor:
        """Returns the rows of a weight [N, r] that give this process's outputs: all, unless ranks
        divide the layer."""
        share = self._shard.output_shares.get(name)
        return up if share is None else up[share.start : share.stop]

    def _product(self, weight: Tensor, scale: float) -> Product:
        weight = (weight.float() * scale).to(self._shard.device, self._shard.dtype)
        make = self._packing.make
        return partial(functional.linear, weight=weight) if make is None else make(weight, None)

    def _add(self, name: str, _module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        """The outputs may be a view of a merged product's: they are written in place."""
        for adapter, rows in self._groups:
            if (layer := adapter.layers.get(name)) is not None:
                x = args[0].reshape(-1, args[0].shape[-1])
                sums = out.view(-1, out.shape[-1])
                sums[rows] += layer.up(layer.down(x[rows]))
