"""Streamed layers: memory does not hold their packed weights. They are fetched from a store in
every step, those of each layer into one of two buffers while the layer before it computes.

A layer's weights always come to the same place of the same buffer, so what points to them need not
know. Knows no step and no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol

import structlog
import torch
from torch import Tensor, nn

from services.stage.device.uploads import Uploads
from services.stage.products.packing import Packing, tiled_bytes
from services.stage.products.tiled_linear import TiledLinear
from services.stage.streaming.layer_file import PAGE_BYTES, LayerFile
from services.stage.streaming.layer_memory import LayerMemory
from shardline.base.clock import monotonic_s
from shardline.base.rounding import round_up
from shardline.contract.fleet.stage_memory import NUM_BUFFERS

log = structlog.get_logger(__name__)

ALIGNMENT = 512
"""Weights begin at multiples of these bytes, as what torch allocates on accelerators does:
libraries choose their kernels by it. Cores load whole cache lines."""
TRIAL_BYTES = 64 << 20
NUM_TRIALS = 3


class Store(Protocol):
    """Holds the weights that memory does not hold."""

    def write(self, pieces: list[tuple[int, Tensor]], begin: int, num_bytes: int) -> None:
        """Stores tensors, int8 [bytes], each at its place behind `begin`. Raises Invalid if there
        is no room for `num_bytes`, whole pages."""

    def buffer(self, num_bytes: int) -> Tensor:
        """Returns int8 [num_bytes] of the memory that layers compute from."""

    def fetch(self, target: Tensor, begin: int) -> Callable[[], object]:
        """Begins to fill a part of a buffer, int8 [bytes], from `begin` on; returns what waits for
        it, which raises Unavailable if that failed."""


class Weight(NamedTuple):
    """One of a layer's that can be streamed."""

    module: nn.Module
    """Computes with it."""
    use: Callable[[Tensor], None]
    """Has the module read it from this memory, int8 [bytes], from now on."""
    data: Tensor
    """int8 [bytes]."""


WeightsOf = Callable[[nn.Module], Iterator[Weight]]


class _StoredWeight(NamedTuple):
    """A weight in the store."""

    module: nn.Module
    use: Callable[[Tensor], None]
    place: int
    """Counted from the layer's first byte."""
    num_bytes: int


class _Layer(NamedTuple):
    """Tells where a layer's weights lie."""

    module: nn.Module
    weights: list[_StoredWeight]
    begin: int
    """In the store."""
    num_bytes: int
    """Whole pages."""


class StreamedLayers:
    """The streamed layers of one shard, in the order of a step: `take` each of them, then `start`.

    Called by the thread that runs steps.
    """

    def __init__(self, store: Store, weights_of: WeightsOf) -> None:
        self._store = store
        self._weights_of = weights_of
        self._layers: list[_Layer] = []
        self._buffers: list[Tensor] = []
        """int8, as large as the largest layer."""
        self._asked: list[tuple[int, Callable[[], object]] | None] = [None] * NUM_BUFFERS
        """The layer that each buffer has or gets, by index, and what waits for it."""

    @classmethod
    def on(cls, uploads: Uploads | None, folder: Path) -> StreamedLayers:
        """Streams by `store_of`. Raises Invalid if that is a file, and `folder` takes none."""
        return cls(store_of(uploads, folder), tiles if uploads is None else matrices)

    def take(self, layer: nn.Module) -> None:
        """Moves the weights of a packed layer into the store. Raises Invalid if that has no room
        for them."""
        weights = list(self._weights_of(layer))
        *places, end = accumulate(
            (round_up(len(weight.data), ALIGNMENT) for weight in weights), initial=0
        )
        begin = self._layers[-1].begin + self._layers[-1].num_bytes if self._layers else 0
        num_bytes = round_up(end, PAGE_BYTES)
        placed = list(zip(places, weights, strict=True))
        self._store.write([(place, weight.data) for place, weight in placed], begin, num_bytes)
        kept = [
            _StoredWeight(weight.module, weight.use, place, len(weight.data))
            for place, weight in placed
        ]
        self._layers.append(_Layer(layer, kept, begin, num_bytes))
        for weight in weights:
            weight.use(torch.empty(0, dtype=torch.int8))

    def start(self) -> None:
        """Allocates the buffers and points each layer to its own. From now on calls wait for
        weights, and raise Unavailable if they cannot be fetched."""
        size = max(layer.num_bytes for layer in self._layers)
        self._buffers = [self._store.buffer(size) for _ in range(NUM_BUFFERS)]
        for index, layer in enumerate(self._layers):
            for module, use, place, num_bytes in layer.weights:
                use(self._buffers[index % NUM_BUFFERS][place : place + num_bytes])
                # a trial calls parts of a layer
                module.register_forward_pre_hook(partial(self._begin, index))
            layer.module.register_forward_pre_hook(partial(self._begin, index))
            layer.module.register_forward_hook(partial(self._end, index))
        self._ask(0, 1)
        log.info("layers are streamed", layers=len(self._layers), buffer_mib=size >> 20)

    def _begin(self, index: int, *_: object) -> None:
        """Waits for a layer's weights, before it computes. Those before it have computed, or never
        will."""
        self._ask(index)
        asked = self._asked[index % NUM_BUFFERS]
        assert asked is not None
        asked[1]()
        self._ask(index, index + 1)

    def _end(self, index: int, *_: object) -> None:
        """Frees a layer's buffer, after it has computed."""
        self._ask(index + 1, index + 2)

    def _ask(self, *indexes: int) -> None:
        """Has these layers fetched, but none into a buffer that an earlier one of them needs. The
        first follows the last."""
        taken: set[int] = set()
        for index in (index % len(self._layers) for index in indexes):
            number = index % NUM_BUFFERS
            asked = self._asked[index % NUM_BUFFERS]
            if number not in taken and (asked is None or asked[0] != index):
                layer = self._layers[index]
                target = self._buffers[number][: layer.num_bytes]
                self._asked[number] = index, self._store.fetch(target, layer.begin)
            taken.add(number)


def store_of(uploads: Uploads | None, folder: Path) -> Store:
    """Returns the store for streamed layers of a device by its uploads: of cores, which have none,
    a file in `folder`, of accelerators the host's memory. Raises Invalid if the folder takes no
    file."""
    return LayerFile(folder) if uploads is None else LayerMemory(uploads)


def tiles(layer: nn.Module) -> Iterator[Weight]:
    """Yields the weights of a layer that was packed for cores."""
    products = (module for module in layer.modules() if isinstance(module, TiledLinear))
    yield from (Weight(product, product.use_tiles, product.tiles) for product in products)


def matrices(layer: nn.Module) -> Iterator[Weight]:
    """Yields the weights of an accelerator's layer."""
    for module in layer.modules():
        for name, tensor in [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]:
            if _is_matrix(tensor):
                data = tensor.detach().contiguous().view(-1).view(torch.int8)
                yield Weight(module, partial(_use_matrix, module, name), data)


def streamed_bytes(layer: nn.Module, packing: Packing, device: torch.device) -> int:
    """Returns the bytes of a layer, not packed yet, that can be streamed on a device."""
    if device.type == "cpu":
        return tiled_bytes(layer, packing)
    return sum(
        tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers()) if _is_matrix(tensor)
    )


def measure(store: Store, synchronize: Callable[[], None]) -> float:
    """Returns the bytes per second that are fetched from an unused store. `synchronize` waits for
    its device. Raises Invalid if it has no room."""
    target = store.buffer(TRIAL_BYTES)
    store.write([(0, torch.zeros(TRIAL_BYTES, dtype=torch.int8))], 0, TRIAL_BYTES)

    def rate() -> float:
        began_s = monotonic_s()
        store.fetch(target, 0)()
        synchronize()
        return TRIAL_BYTES / (monotonic_s() - began_s)

    return max(rate() for _ in range(NUM_TRIALS))


def _is_matrix(tensor: Tensor) -> bool:
    """Norms and biases are small: they stay."""
    return tensor.dim() > 1 and tensor.is_floating_point()


def _use_matrix(module: nn.Module, name: str, memory: Tensor) -> None:
    """Its dtype and the shape of its rows are those that it had."""
    last = getattr(module, name)
    weight = memory.view(last.dtype).view(-1, *last.shape[1:])
    is_parameter = name in dict(module.named_parameters(recurse=False))
    setattr(module, name, nn.Parameter(weight, requires_grad=False) if is_parameter else weight)
