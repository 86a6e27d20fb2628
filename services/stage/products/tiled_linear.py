"""Linear layers on CPU with weights in tiles for our own products: a row's bits depend on that row
only.

So they take any number of rows, and need no row buckets. Weights are float32, bfloat16, int8 with
one scale for each output, or integers in groups; inputs and outputs are float32 with such weights,
else bfloat16. Knows no model.

Letters of shapes: T rows, K inputs and N outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import byref
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from services.stage.kernels.kernel import Kernel, ProductCall, Weights
from services.stage.products.groups import Groups, fitted, in_8_bits, looked_up, rounded, tiled
from shardline.base.rounding import round_up

_IN_GROUPS = {Weights.INT4, Weights.GROUPED_INT8}
TILE_OUTPUTS = 16
TILE_BYTES = 64
"""Of one output's weights, in a tile."""
AT_ONCE = 1 << 24
"""Weights that are quantized at once, in float32: memory never holds a whole layer of those."""


class Int8(NamedTuple):
    """A weight [N, K] as integers: their product with the scales of their rows is near the
    weight."""

    integers: Tensor
    """int8 [N, K], from -127 to 127."""
    scales: Tensor
    """float32 [N]."""


class TiledLinear(nn.Module):
    """A linear layer with its weight stored in tiles; the original is not kept."""

    def __init__(
        self,
        kernel: Kernel,
        weight: Tensor | Sequence[Tensor | Groups],
        bias: Tensor | None,
        weights: Weights,
    ) -> None:
        """Packs a weight [N, K] of any float dtype, with its bias [N], to be stored in the format
        `weights`: if in groups, also several weights, [N, K] together. Those in groups already
        keep their numbers, but that only `Weights.INT4` has some in 4 bits."""
        super().__init__()
        if weights is Weights.INT8 and not isinstance(weight, Tensor):
            weights = Weights.GROUPED_INT8
        self._kernel = kernel
        self._empty = torch.empty(
            0, dtype=torch.float32 if weights is Weights.FLOAT32 else torch.bfloat16
        )
        self._bias = None if bias is None else _padded(bias.detach().float())
        scales = None
        sums = None
        first_int8 = 0
        has_zeros = False
        if isinstance(weight, Tensor) and weights not in _IN_GROUPS:
            self.out_features, self.in_features = weight.shape
            rows = weight.detach().to(self._empty.dtype)
            if weights is Weights.INT8:
                rows, scales = quantized(weight, spread)
                sums = _padded(rows.sum(1, dtype=torch.int32))
                scales = _padded(scales)
            self._tiles = _packed(kernel, rows.contiguous())
        else:
            given = [weight] if isinstance(weight, Tensor) else weight
            first = given[0] if isinstance(given[0], Tensor) else given[0].numbers
            self.in_features = first.shape[1]
            parts = [_grouped(kernel, each, weights) for each in given]
            self._tiles, outputs, first_int8, has_zeros = tiled(parts)
            self.out_features = len(outputs)
            scales = _padded(outputs)
        self._scales = scales
        self._sums = sums
        self.call = ProductCall(
            weights=self._tiles.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            scales=None if scales is None else scales.data_ptr(),
            column_sums=None if sums is None else sums.data_ptr(),
            num_inputs=self.in_features,
            num_outputs=self.out_features,
            first_int8=first_int8,
            kind=weights,
            has_zeros=has_zeros,
        )
        """What the kernel is asked, but for rows and threads."""

    @property
    def weight(self) -> Tensor:
        """An empty tensor [0] of the dtype of inputs: some models ask a weight for its dtype or
        device."""
        return self._empty

    @property
    def tiles(self) -> Tensor:
        """The packed weight, int8 [bytes]."""
        return self._tiles

    def weights_of(self, outputs: Tensor) -> Tensor:
        """Returns the weights, [R, K] in the dtype of inputs, of outputs in groups of 8 bits by
        their numbers, int64 [R]."""
        assert self._scales is not None
        rows = looked_up(self._tiles, self.in_features, outputs)
        return (rows * self._scales[outputs][:, None]).to(self._empty.dtype)

    def order_inputs(self, order: Tensor) -> None:
        """Has place i of a weight in groups mean input order[i], int32 [K], from now on."""
        self._order = order.contiguous()
        self.call.x_order = self._order.data_ptr()

    def use_tiles(self, tiles: Tensor) -> None:
        """Reads the packed weight, int8 [bytes], from this memory from now on."""
        self._tiles = tiles
        self.call.weights = tiles.data_ptr()

    def forward(self, x: Tensor) -> Tensor:
        """Returns x @ weight.T + bias: x [..., T, K] to [..., T, N], in the dtype of `weight`. Rows
        of x may lie apart. Raises TypeError for an x of another dtype."""
        if x.dtype != self._empty.dtype:
            raise TypeError(f"a product of {self._empty.dtype} was given {x.dtype}")
        rows = x.reshape(-1, self.in_features)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        out = rows.new_empty(len(rows), self.out_features)
        call = self.call
        call.x = rows.data_ptr()
        call.x_stride = rows.stride(0)
        call.num_rows = len(rows)
        call.out = out.data_ptr()
        call.out_stride = self.out_features
        call.num_threads = torch.get_num_threads()
        status = self._kernel.multiply(byref(call))
        assert status == 0, f"no products of weights {call.kind}"
        return out.reshape(*x.shape[:-1], self.out_features)


class TiledEmbedding(nn.Module):
    """An embedding that is looked up in the tiles of a layer in groups of 8 bits, which may be the
    output layer's."""

    def __init__(self, layer: TiledLinear) -> None:
        """Takes a layer with the outputs of a vocabulary."""
        super().__init__()
        self._layer = layer

    @property
    def weight(self) -> Tensor:
        """An empty tensor [0] of the dtype of outputs: some models ask a weight for its dtype or
        device."""
        return self._layer.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Looks up ids int64 [...]; returns [..., H] in the dtype of the layer."""
        return self._layer.weights_of(ids.reshape(-1)).reshape(*ids.shape, -1)


class Int8Embedding(nn.Module):
    """An embedding with an int8 weight, with one scale for each token."""

    def __init__(self, weight: Tensor) -> None:
        """Takes a weight [V, H] of any float dtype; V the vocabulary, H the hidden size."""
        super().__init__()
        self._rows = quantized(weight)
        self._dtype = weight.dtype
        self._empty = torch.empty(0, dtype=weight.dtype)

    @property
    def weight(self) -> Tensor:
        """An empty tensor [0] of the dtype of outputs: some models ask a weight for its dtype or
        device."""
        return self._empty

    def forward(self, ids: Tensor) -> Tensor:
        """Looks up ids int64 [...]; returns [..., H] in the dtype of the weight that was given."""
        integers, scales = self._rows
        return (functional.embedding(ids, integers).float() * scales[ids][..., None]).to(
            self._dtype
        )


def _grouped(kernel: Kernel, weight: Tensor | Groups, weights: Weights) -> Groups:
    """Returns a weight [N, K] in groups of the format `weights`, or as they are."""
    if isinstance(weight, Tensor):
        return fitted(kernel, weight) if weights is Weights.INT4 else rounded(weight)
    return weight if weights is Weights.INT4 else in_8_bits(weight)


def quantized(weight: Tensor, change: Callable[[Tensor], Tensor] | None = None) -> Int8:
    """Returns a weight [N, K] of any float dtype as integers, the largest of each row 127 in
    absolute value. `change` is made to some of its rows, float32 [N, K], at a time before."""
    exact = (rows.float() for rows in weight.detach().split(max(1, AT_ONCE // weight.shape[1])))
    parts = [_quantized(rows if change is None else change(rows)) for rows in exact]
    return Int8(
        torch.cat([part.integers for part in parts]), torch.cat([part.scales for part in parts])
    )


def spread(rows: Tensor) -> Tensor:
    """Returns rows, float32 [T, K], times the Hadamard matrix tile by tile: [T, K rounded up to
    whole tiles]. Its square is TILE_BYTES.

    The kernel spreads inputs so, and divides them by TILE_BYTES, before they become integers: an
    outlier among them is shared by its tile, and their common scale is finer. Sums of fixed pairs,
    as there: everywhere the same bits.
    """
    values = functional.pad(rows, (0, -rows.shape[1] % TILE_BYTES))
    size = values.shape
    distance = 1
    while distance < TILE_BYTES:
        left, right = values.reshape(len(rows), -1, 2, distance).unbind(2)
        values = torch.stack((left + right, left - right), 2)
        distance *= 2
    return values.reshape(size)


def _quantized(exact: Tensor) -> Int8:
    scales = exact.abs().amax(1) / 127
    return Int8(
        (exact / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8),
        scales,
    )


def _packed(kernel: Kernel, rows: Tensor) -> Tensor:
    num_outputs = rows.shape[0]
    num_bytes = rows.shape[1] * rows.element_size()
    size = round_up(num_outputs, TILE_OUTPUTS) * round_up(num_bytes, TILE_BYTES)
    tiles = torch.empty(size, dtype=torch.int8)
    kernel.pack_weights(rows.data_ptr(), tiles.data_ptr(), num_outputs, num_bytes)
    return tiles


def _padded(values: Tensor) -> Tensor:
    """The values [N] with zeros up to whole tiles, as the kernel reads them."""
    return functional.pad(values, (0, -len(values) % TILE_OUTPUTS)).contiguous()
