"""Layers of our own products: right beside float64, and each row with the same bits whatever runs
beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from services.stage.kernels.kernel import Kernel, Weights
from services.stage.products import groups
from services.stage.products.tiled_linear import (
    TILE_BYTES,
    Int8Embedding,
    TiledEmbedding,
    TiledLinear,
    quantized,
    spread,
)
from tests.unit.stage.attention.attending import all_kernels

KINDS = [(kernel, weights) for kernel in all_kernels() for weights in Weights]
"""Every library that this processor runs, with every kind of weights."""
IDS = [f"{kernel.isa}-{weights.name.lower()}" for kernel, weights in KINDS]
SIZES = st.integers(1, 150)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def layer_of(kind: int, weight: Tensor, bias: Tensor | None) -> TiledLinear:
    """A layer that computes by KINDS[kind]."""
    kernel, weights = KINDS[kind]
    return TiledLinear(kernel, weight, bias, weights)


def is_int8(kind: int) -> bool:
    """Whether the weights of KINDS[kind] are."""
    return KINDS[kind][1] is Weights.INT8


def has_groups(kind: int) -> bool:
    """Whether the weights of KINDS[kind] do."""
    return KINDS[kind][1] in {Weights.INT4, Weights.GROUPED_INT8}


def in_groups(kind: int, weight: Tensor) -> groups.Groups:
    """A weight as KINDS[kind] stores it."""
    if KINDS[kind][1] is Weights.INT4:
        return groups.fitted(KINDS[0][0], weight)
    return groups.rounded(weight)


def dtype_of(kind: int) -> torch.dtype:
    """Of the inputs and outputs of KINDS[kind]."""
    return torch.float32 if KINDS[kind][1] is Weights.FLOAT32 else torch.bfloat16


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expected(x: Tensor, weight: Tensor, bias: Tensor | None, *, int8: bool) -> Tensor:
    """The product in float64; of int8, that of the integers that the layer multiplies."""
    out = x.double()
    by = weight.double()
    if int8:
        inputs = spread(x.float() / TILE_BYTES)
        steps = inputs.abs().amax(-1, keepdim=True) / 127
        out = (inputs / steps.clamp(min=1e-30)).round().double() * steps.double()
        integers, scales = quantized(weight, spread)
        by = integers.double() * scales.double()[:, None]
    return out @ by.T + (0 if bias is None else bias.double())


def group_product(x: Tensor, weight: groups.Groups, bias: Tensor | None) -> Tensor:
    """What the kernel promises of groups, in torch: the integers of each group summed exactly, then
    scaled and added in float32, in the order of the groups."""
    width = weight.numbers.shape[1]
    inputs = functional.pad(x.float(), (0, width - x.shape[1])).unflatten(1, (-1, groups.GROUP))
    largest = inputs.abs().amax(2)
    inverse = torch.full_like(largest, 127).div(largest)  # `127 / largest` would round twice
    integers = torch.where(largest[..., None] > 0, inputs * inverse[..., None], 0).round()
    numbers = weight.numbers.unflatten(1, (-1, groups.GROUP)).double()
    steps, totals = largest / 127, largest / 127 * integers.sum(2)
    sums = torch.zeros(len(x), len(numbers))
    for group in range(inputs.shape[1]):
        whole = (integers[:, group].double() @ numbers[:, group].T).float()
        scaled = (whole * steps[:, group, None]).double()
        sums = (sums.double() + scaled * weight.scales[:, group].double()).float()
        if not isinstance(weight, groups.Int8Groups):
            minimums = weight.minimums[:, group].double()
            if isinstance(weight, groups.ZeroPointGroups):
                minimums = minimums * weight.scales[:, group].double()
            sums = (sums.double() + totals[:, group, None].double() * minimums).float()
    return (sums * weight.outputs + (0 if bias is None else bias.float())).bfloat16()


def fused_chain(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in float32 by fused multiply-adds in the order of the inputs. float64 holds a
    product exactly."""
    sums = torch.zeros(len(x), len(weight))
    for inputs, weights in zip(x.double().T, weight.double().T, strict=True):
        sums = torch.addcmul(sums.double(), inputs[:, None], weights[None]).float()
    return sums


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=IDS)
@settings(max_examples=40, deadline=None)
@given(shape=st.tuples(SIZES, SIZES, SIZES), has_bias=st.booleans(), seed=st.integers(0, 99))
def test_a_layer_gives_the_product_of_any_shape(
    kind: int, shape: tuple[int, int, int], has_bias: bool, seed: int
) -> None:
    (num_rows, width, outputs), dtype = shape, dtype_of(kind)
    x = drawn(seed, num_rows, width, dtype=dtype)
    weight = drawn(seed + 1, outputs, width, dtype=dtype)
    bias = drawn(seed + 2, outputs, dtype=dtype) if has_bias else None

    got = layer_of(kind, weight, bias)(x).double()

    if has_groups(kind):
        assert torch.equal(got, group_product(x, in_groups(kind, weight), bias).double())
        return
    wanted = expected(x, weight, bias, int8=is_int8(kind))
    # One rounding of the output and those of a sum in float32; in int8 also x / step, which may
    # round to the other of two near integers.
    steps = (
        spread(x.float() / TILE_BYTES).abs().amax(-1, keepdim=True)
        / 127
        * spread(weight.float()).abs().amax()
        * 4
        * is_int8(kind)
    )
    sums = 1e-6 * (x.double().abs() @ weight.double().abs().T)
    assert (
        (got - wanted).abs() <= torch.finfo(dtype).eps * wanted.abs() + 1e-6 + sums + steps
    ).all()


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=IDS)
@pytest.mark.parametrize(("width", "outputs"), [(512, 192), (77, 50), (2816, 40)])
def test_a_row_keeps_its_bits_whatever_runs_beside_it(kind: int, width: int, outputs: int) -> None:
    # Given rows enough for several panels
    dtype = dtype_of(kind)
    layer = layer_of(kind, drawn(1, outputs, width, dtype=dtype), drawn(2, outputs, dtype=dtype))
    rows = drawn(3, 700, width, dtype=dtype)
    torch.set_num_threads(1)
    alone = torch.cat([layer(row[None]) for row in rows[::7]])

    # When any number of them runs, from any place, in rows that lie apart, on one thread or two
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for num in (2, 9, 16, 17, 33, 95, 260, 513, 700):
            assert torch.equal(layer(rows[:num])[::7], alone[: -(-num // 7)]), num
        assert torch.equal(layer(rows[None, 7 * 5 :])[0, ::7], alone[5:])
        assert torch.equal(layer(torch.cat([rows, rows], dim=1)[:, :width])[::7], alone)
    # or on so many that some wait for a core and others take their columns
    torch.set_num_threads(5)
    for found in [layer(rows[:9]) for _ in range(20)]:
        assert torch.equal(found[::7], alone[:2])


@pytest.mark.parametrize(
    "kind", [kind for kind in range(len(KINDS)) if is_int8(kind)], ids=lambda kind: IDS[kind]
)
@pytest.mark.parametrize(
    ("num_rows", "width", "outputs"), [(1, 64, 16), (37, 130, 50), (64, 1024, 48)]
)
def test_int8_has_the_same_bits_with_every_instruction_set(
    kind: int, num_rows: int, width: int, outputs: int
) -> None:
    # Given what the kernel promises, in torch: integers summed exactly, then scaled in float32 in
    # one order
    x = drawn(5, num_rows, width)
    weight = drawn(6, outputs, width)
    bias = drawn(7, outputs)
    inputs = spread(x.float() / TILE_BYTES)
    largest, (integers, scales) = inputs.abs().amax(1, keepdim=True), quantized(weight, spread)
    # `127 / largest` would round twice
    rows = (inputs * torch.full_like(largest, 127).div(largest)).round()
    sums = (rows.double() @ integers.double().T).float()
    wanted = (sums * scales * (largest / 127) + bias.float()).bfloat16()

    assert torch.equal(layer_of(kind, weight, bias)(x), wanted)


@pytest.mark.parametrize(
    "kind", [kind for kind in range(len(KINDS)) if has_groups(kind)], ids=lambda kind: IDS[kind]
)
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_groups_do_not_overflow_where_all_numbers_are_largest(kind: int, sign: int) -> None:
    ones = torch.ones(16, 2)
    weights = (
        groups.gridded(torch.full((16, 64), 15, dtype=torch.uint8), ones, -ones),
        groups.scaled(torch.full((16, 64), -128 * sign).clamp(max=127).to(torch.int8), ones),
    )
    x = torch.full((9, 64), 127.0 * sign).bfloat16()

    for weight in weights:
        got = TiledLinear(KINDS[kind][0], [weight], None, Weights.INT4)(x)
        assert torch.equal(got, group_product(x, weight, None))


@pytest.mark.parametrize(
    "kernel", [kernel for kernel, kind in KINDS if kind is Weights.INT4], ids=lambda each: each.isa
)
@pytest.mark.parametrize("sizes", [(16, 32, 48), (80, 16, 7), (40, 16)])
def test_weights_side_by_side_keep_their_numbers(kernel: Kernel, sizes: tuple[int, ...]) -> None:
    # Given weights in 4 bits, and the last in 8
    x = drawn(1, 37, 192)
    weights = [drawn(2 + size, size, 192) for size in sizes]
    parts: list[groups.Groups] = [
        *(groups.fitted(kernel, each) for each in weights[:-1]),
        groups.rounded(weights[-1]),
    ]

    # When they are one product
    layer = TiledLinear(kernel, parts, None, Weights.INT4)

    # Then each gives what it gives alone, those in 4 bits where they fill columns, else in 8
    fills = sum(sizes[:-1]) % groups.COLUMN_OUTPUTS == 0
    kept: list[groups.Groups] = parts if fills else [*map(groups.in_8_bits, parts)]
    assert torch.equal(layer(x), torch.cat([group_product(x, each, None) for each in kept], 1))
    num_in_4 = sum(sizes[:-1]) if fills else 0
    columns = -(-(sum(sizes) - num_in_4) // 16) * 16
    expected = num_in_4 * groups.INT4_BYTES + columns * groups.INT8_BYTES
    assert layer.tiles.nbytes == 192 * expected


@pytest.mark.parametrize(
    "kernel", [kernel for kernel, kind in KINDS if kind is Weights.INT4], ids=lambda each: each.isa
)
@pytest.mark.parametrize(("width", "outputs"), [(64, 7), (192, 48), (2816, 40)])
def test_zero_points_and_sorted_inputs_give_their_product_for_any_rows(
    kernel: Kernel, width: int, outputs: int
) -> None:
    # Given a weight with zero points, and its inputs in another order
    generator = torch.Generator().manual_seed(width)
    numbers = torch.randint(0, 16, (outputs, width), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 17, (outputs, width // groups.GROUP), generator=generator)
    scales = (torch.rand(zeros.shape, generator=generator) + 1e-3).half()
    weight = groups.zero_pointed(numbers, scales, zeros)
    each = (numbers.int() - zeros.repeat_interleave(groups.GROUP, 1)) * scales.float()[
        ..., None
    ].expand(-1, -1, groups.GROUP).flatten(1)
    assert torch.equal(weight.floats(), each)
    order = torch.randperm(width, generator=generator).int()
    layer = TiledLinear(kernel, [weight], None, Weights.INT4)
    layer.order_inputs(order)
    rows = drawn(3, 260, 2 * width)[:, :width]

    # Then a row gives its sum, whatever runs beside it
    expected = group_product(rows[:, order.long()], weight, None)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for num in (1, 2, 9, 33, 260):
            assert torch.equal(layer(rows[:num]), expected[:num]), num
        assert torch.equal(layer(rows[None, 35:])[0], expected[35:])


def test_zero_points_beside_minimums_become_minimums() -> None:
    kernel = KINDS[0][0]
    numbers = torch.arange(16 * 64, dtype=torch.int64).view(16, 64) % 16
    zeros = torch.full((16, 2), 8)
    weight = groups.zero_pointed(numbers.byte(), torch.rand(16, 2).half() + 0.5, zeros)
    other = groups.fitted(kernel, drawn(1, 16, 64))
    x = drawn(2, 9, 64)

    found = TiledLinear(kernel, [weight, other], None, Weights.INT4)(x)

    assert torch.equal(
        found, torch.cat([group_product(x, each, None) for each in (weight, other)], 1)
    )


def test_a_fitted_weight_is_nearer_than_one_rounded_to_the_range_of_its_groups() -> None:
    weight = drawn(1, 40, 512, dtype=torch.float32) * torch.logspace(-6, 3, 40)[:, None]
    values = weight.unflatten(1, (-1, groups.GROUP))
    low, high = torch.aminmax(values, dim=2, keepdim=True)
    step = (high - low) / 15
    rounded = ((values - low) / step).round() * step + low

    fitted = groups.fitted(KINDS[0][0], weight)

    wrong = (fitted.floats() - weight).square().sum(1)
    assert (wrong / (rounded - values).square().sum((1, 2))).mean() < 0.95


@pytest.mark.parametrize("zero", [8, 3, -2.6, 21.3])
def test_the_grid_of_a_file_comes_back_from_its_values(zero: float) -> None:
    # Given weights of a file of 4 bits, one scale for 64 inputs, as their rounded floats
    generator = torch.Generator().manual_seed(round(abs(zero)))
    numbers = torch.randint(0, 16, (20, 128), generator=generator)
    scales = (torch.rand(20, 2, generator=generator) * 1e-3 + 1e-4).half()
    weight = (numbers - zero) * scales.float().repeat_interleave(64, 1)

    # When they become integers again, with every library
    fits = [groups.fitted(kernel, weight.bfloat16()) for kernel in all_kernels()]

    # Then they are nearer to the file's than the floats were, and all say the same
    assert (fits[0].floats() - weight).norm() < (weight.bfloat16() - weight).norm()
    for other in fits[1:]:
        assert all(torch.equal(one, two) for one, two in zip(fits[0], other, strict=True))


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=IDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_spoils_its_own_row_only(kind: int, bad: float) -> None:
    x = drawn(1, 20, 96, dtype=dtype_of(kind))
    layer = layer_of(kind, drawn(2, 32, 96), None)
    clean = layer(x)
    x[7, 5] = bad
    got = layer(x)
    assert not got[7].isfinite().any()
    assert torch.equal(got[:7], clean[:7])
    assert torch.equal(got[8:], clean[8:])


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=IDS)
def test_weights_and_rows_of_zeros_stay_zeros(kind: int) -> None:
    zeros = torch.zeros(3, 20, dtype=dtype_of(kind))
    dtype = dtype_of(kind)
    assert torch.equal(
        layer_of(kind, torch.zeros(20, 70), None)(drawn(1, 3, 70, dtype=dtype)), zeros
    )
    assert torch.equal(
        layer_of(kind, drawn(1, 20, 70), None)(torch.zeros(3, 70, dtype=dtype)), zeros
    )


@pytest.mark.parametrize(
    "kind", [kind for kind in range(len(KINDS)) if is_int8(kind)], ids=lambda kind: IDS[kind]
)
def test_an_outlier_leaves_the_other_inputs_of_its_row_their_digits(kind: int) -> None:
    x = drawn(1, 8, 256)
    weight = drawn(2, 64, 256)
    x[:, 3] = 40.0
    wanted = x.double() @ weight.double().T
    (steps, _), plain = quantized(weight), x.float().abs().amax(-1, keepdim=True) / 127
    assert steps.dtype == torch.int8
    rounded = (x.float() / plain).round().double() * plain.double() @ weight.double().T

    error = (layer_of(kind, weight, None)(x).double() - wanted).norm()

    assert error < (rounded - wanted).norm() / 3


def test_an_int8_embedding_is_near_the_one_it_replaces() -> None:
    weight = drawn(1, 50, 40)
    ids = torch.tensor([[3, 49, 0]])
    embedding = Int8Embedding(weight)
    assert embedding.weight.dtype == embedding(ids).dtype == torch.bfloat16
    steps = weight[ids].float().abs().amax(-1, keepdim=True) / 127
    assert (
        (embedding(ids).float() - weight[ids].float()).abs()
        <= steps + 2**-8 * weight[ids].float().abs()
    ).all()


@pytest.mark.parametrize(("vocabulary", "width"), [(50, 96), (64, 130)])
def test_an_embedding_looks_up_the_weights_of_an_output_layer(vocabulary: int, width: int) -> None:
    weight = drawn(1, vocabulary, width)
    ids = torch.tensor([[3, vocabulary - 1, 0], [17, 16, 15]])
    embedding = TiledEmbedding(TiledLinear(KINDS[0][0], weight, None, Weights.GROUPED_INT8))
    assert embedding.weight.dtype == torch.bfloat16
    assert torch.equal(embedding(ids), groups.rounded(weight).floats()[ids][..., :width].bfloat16())


@pytest.mark.parametrize(
    ("num_rows", "width", "outputs"), [(1, 64, 16), (37, 130, 50), (64, 1024, 48)]
)
def test_float32_has_the_same_bits_with_every_instruction_set(
    num_rows: int, width: int, outputs: int
) -> None:
    x = drawn(5, num_rows, width, dtype=torch.float32)
    weight = drawn(6, outputs, width, dtype=torch.float32)
    for kind in (kind for kind, (_, weights) in enumerate(KINDS) if weights is Weights.FLOAT32):
        assert torch.equal(layer_of(kind, weight, None)(x), fused_chain(x, weight)), IDS[kind]


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=IDS)
def test_an_input_of_another_dtype_is_refused(kind: int) -> None:
    other = torch.float16 if dtype_of(kind) == torch.float32 else torch.float32
    with pytest.raises(TypeError, match=f"was given {other}"):
        layer_of(kind, drawn(1, 16, 16), None)(drawn(2, 3, 16, dtype=other))
