"""Streamed layers: memory does not hold their packed weights. They are read from a file in every step, those of each
layer into one of two buffers while the layer before it computes.

A layer's weights always come to the same place of the same buffer, so whoever points to them need not know. Knows no
step and no kernel.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import structlog
import torch
from torch import Tensor, nn

from services.stage.model.layer_file import PAGE_BYTES, LayerFile, pages
from services.stage.model.tiled_linear import TiledLinear
from shardline.rounding import round_up

log = structlog.get_logger(__name__)

NUM_BUFFERS = 2
"""One to compute from, one to read into."""
LINE_BYTES = 64
"""Tiles begin at multiples of it: the kernel loads whole cache lines."""


class _Layer(NamedTuple):
    """Where a layer's tiles lie."""

    module: nn.Module
    products: list[tuple[TiledLinear, int, int]]
    """Each with the place and the bytes of its tiles, counted from the layer's first."""
    begin: int
    """In the file."""
    num_bytes: int
    """Whole pages."""


class StreamedLayers:
    """The streamed layers of one shard, in the order of a step: `take` each of them, then `start`.

    Called by the thread that runs steps. A thread of its own reads, one layer after the other.
    """

    def __init__(self, folder: Path) -> None:
        """Makes a file in `folder`. Raises Invalid if it takes none."""
        self._file = LayerFile(folder)
        self._layers: list[_Layer] = []
        self._buffers: list[Tensor] = []
        """int8, as large as the largest layer."""
        self._asked: list[tuple[int, Future[None]] | None] = [None] * NUM_BUFFERS
        """The layer that each buffer has or gets, by index."""
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="streamed-layers")

    def take(self, layer: nn.Module) -> None:
        """Moves the tiles of a packed layer into the file. Raises Invalid if the disk has no room for them."""
        products = [module for module in layer.modules() if isinstance(module, TiledLinear)]
        tiles = [product.tiles for product in products]
        *places, end = accumulate((round_up(each.nbytes, LINE_BYTES) for each in tiles), initial=0)
        begin = self._layers[-1].begin + self._layers[-1].num_bytes if self._layers else 0
        num_bytes = round_up(end, PAGE_BYTES)
        self._file.write(list(zip(places, tiles, strict=True)), begin, num_bytes)
        sizes = [each.nbytes for each in tiles]
        self._layers.append(_Layer(layer, list(zip(products, places, sizes, strict=True)), begin, num_bytes))
        for product in products:
            product.use_tiles(torch.empty(0, dtype=torch.int8))

    def start(self) -> None:
        """Allocates the buffers and points each layer to its own. From now on calls wait for weights, and raise
        Unavailable if the disk fails."""
        size = max(layer.num_bytes for layer in self._layers)
        self._buffers = [pages(size) for _ in range(NUM_BUFFERS)]
        for index, layer in enumerate(self._layers):
            for product, place, num_bytes in layer.products:
                product.use_tiles(self._buffers[index % NUM_BUFFERS][place : place + num_bytes])
                product.register_forward_pre_hook(partial(self._begin, index))  # a trial calls parts of a layer
            layer.module.register_forward_pre_hook(partial(self._begin, index))
            layer.module.register_forward_hook(partial(self._end, index))
        self._ask(0, 1)
        log.info("layers are streamed", layers=len(self._layers), buffer_mib=size >> 20)

    def _begin(self, index: int, *_: object) -> None:
        """Before a layer computes: waits for its weights. Those before it have computed, or never will."""
        self._ask(index)
        asked = self._asked[index % NUM_BUFFERS]
        assert asked is not None
        asked[1].result()
        self._ask(index, index + 1)

    def _end(self, index: int, *_: object) -> None:
        """After a layer has computed: its buffer is free."""
        self._ask(index + 1, index + 2)

    def _ask(self, *indexes: int) -> None:
        """Has these layers read, but one whose buffer an earlier one of them needs. The first follows the last."""
        taken: set[int] = set()
        for index in (index % len(self._layers) for index in indexes):
            number, asked = index % NUM_BUFFERS, self._asked[index % NUM_BUFFERS]
            if number not in taken and (asked is None or asked[0] != index):
                layer = self._layers[index]
                target = self._buffers[number][: layer.num_bytes]
                self._asked[number] = index, self._reader.submit(self._file.read, target, layer.begin)
            taken.add(number)
