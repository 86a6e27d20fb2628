"""The GPU attention: against float64, against the C++ kernel, and its promise that a row's bits
depend on nothing else.

Runs in Triton's interpreter, or compiled on the device that SHARDLINE_TEST_DEVICE names.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.stage.attention.attention import Attention, KvShape, MicroBatch, PagedKv, Span
from services.stage.attention.triton_backend import TritonBackend, load
from shardline.base.errors import ProtocolError
from tests.unit.stage.attention.attending import (
    LAYER,
    Case,
    Layer,
    Place,
    attend,
    bounds,
    kernels,
    reference,
)

DEVICE = os.environ.get("SHARDLINE_TEST_DEVICE", "cpu")
TRITON = TritonBackend()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SIZES = [(20, 24), (64, None), (80, None), (96, None), (192, 128)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any layer that a causal language model may have, small."""
    dim, value_dim = draw(st.sampled_from(SIZES))
    options: dict[str, Any] = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "softcap": st.sampled_from([2.0, 50.0]),
                "scaling": st.sampled_from([0.05, 0.3]),
            },
        )
    )
    case = Case(
        lengths=draw(st.lists(st.integers(1, 90), min_size=1, max_size=2)),
        num_kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 3, 4, 7, 20])),
        head_dim=dim,
        value_dim=value_dim,
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        options=options | draw(bounds()),
        seed=draw(st.integers(0, 99)),
    )
    if draw(st.booleans()):
        case.options["s_aux"] = torch.linspace(-2, 2, case.num_kv_heads * case.group).to(case.dtype)
    return case


chunkings = st.lists(st.integers(1, 70), min_size=1, max_size=4).filter(
    lambda sizes: sum(sizes) >= 8 * len(sizes)
)
"""Decode rows beside prefills. Not decodes alone: the interpreter takes a millisecond for a row's
block."""
places = st.builds(Place, device=st.just(DEVICE), shuffle=st.integers(0, 9))


@settings(max_examples=8)
@given(case=cases(), chunks=chunkings, place=places)
def test_any_layer_in_any_chunks_matches_the_reference(
    case: Case, chunks: list[int], place: Place
) -> None:
    outputs = attend(TRITON, case, chunks, min_rows=2, place=place)
    for output, expected in zip(outputs, reference(case), strict=True):
        assert output.dtype == case.dtype
        torch.testing.assert_close(
            output.double(), expected, atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype]
        )


@pytest.mark.parametrize("kernel", kernels()[:1], ids=lambda kernel: kernel.isa)
@settings(max_examples=5)
@given(case=cases(), chunks=chunkings, place=places)
def test_any_layer_matches_our_kernel_on_the_cpu(
    kernel: Any, case: Case, chunks: list[int], place: Place
) -> None:
    ours = attend(kernel, case, chunks)
    other = attend(TRITON, case, chunks, place=place)
    tolerance = TOLERANCE[case.dtype]
    for one, another in zip(ours, other, strict=True):
        torch.testing.assert_close(another, one, atol=tolerance, rtol=tolerance)


@settings(max_examples=8)
@given(case=cases(), chunks=chunkings, place=places)
def test_a_row_has_its_bits_in_any_crowd_chunk_and_block(
    case: Case, chunks: list[int], place: Place
) -> None:
    alone = replace(case, lengths=case.lengths[:1])
    whole = attend(TRITON, alone, case.lengths[:1], place=Place(device=DEVICE))
    crowded = attend(TRITON, case, chunks, min_rows=4, place=place)
    assert torch.equal(crowded[0], whole[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 40, "s_aux": torch.ones(6)}, {"attention_chunk": 33}],
    ids=["plain", "window, sinks", "chunks"],
)
def test_decoded_rows_have_the_bits_of_a_prefill(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    case = Case(lengths=[70], num_kv_heads=1, group=6, head_dim=80, dtype=dtype, options=options)
    whole = attend(TRITON, case, [70], place=Place(device=DEVICE))
    place = Place(device=DEVICE, shuffle=3)
    assert torch.equal(attend(TRITON, case, [60, *[1] * 9, 63], place=place)[0], whole[0])


def test_rows_with_infinities_leave_other_rows_alone() -> None:
    # Given a sequence whose last rows overflowed
    case = Case(lengths=[70], dtype=torch.float16)
    attention = Attention(TRITON)
    blocks = [2, 0]
    attention.bind(
        PagedKv(layers={LAYER: case.shape}, num_blocks=3, dtype=case.dtype, device=DEVICE)
    )
    query, key, value = (part[None].to(DEVICE) for part in case.rows()[0])

    def rows(end: int) -> torch.Tensor:
        attention.use(MicroBatch.of([Span(start=0, length=end, blocks=blocks)], device=DEVICE))
        new = [part[:, :, :end] for part in (query, key, value)]
        return attention.attend(Layer(LAYER), new[0], new[1], new[2], None)[0][0].cpu()

    expected = rows(70)
    value[:, :, 66:] = float("inf")
    rows(70)

    # When another takes these blocks and is shorter, then it has its own bits
    assert torch.equal(rows(66), expected[:66])


def test_only_rows_of_the_micro_batch_are_written() -> None:
    kv = PagedKv(
        layers={0: KvShape(num_kv_heads=1, head_dim=16)},
        num_blocks=4,
        dtype=torch.float32,
        device=DEVICE,
    )
    spans = [Span(start=70, length=2, blocks=[3, 1]), Span(start=0, length=1, blocks=[2])]
    attention = Attention(TRITON)
    rows = torch.ones(1, 1, 5, 16, device=DEVICE)
    attention.bind(kv)
    attention.use(MicroBatch.of(spans, min_rows=5, device=DEVICE))
    out = attention.attend(Layer(0), rows, rows, rows, None)[0]
    assert int(kv.values[0].count_nonzero()) == int(kv.keys[0].count_nonzero()) == 3 * 16
    assert kv.values[0][1, 0, 6:8].all()
    assert kv.values[0][2, 0, 0].all()
    assert out[0, 2].eq(1).all()
    assert not out[0, 3:].any()


@pytest.mark.parametrize("block", [-1, 4])
def test_blocks_outside_the_pool_are_refused(block: int) -> None:
    attention = Attention(TRITON)
    attention.bind(
        PagedKv(layers={0: KvShape(num_kv_heads=1, head_dim=16)}, num_blocks=4, dtype=torch.float32)
    )
    with pytest.raises(ProtocolError, match="4 KV blocks"):
        attention.use(MicroBatch.of([Span(start=0, length=3, blocks=[block])]))


class TestWhichAttention:
    def test_a_cpu_has_a_kernel_of_its_own(self) -> None:
        assert load(torch.device("cpu")) is None

    @pytest.mark.parametrize("kind", ["cuda", "xpu"])
    def test_gpus_that_triton_serves_get_it(self, kind: str) -> None:
        assert isinstance(load(torch.device(kind)), TritonBackend)

    def test_others_fall_back_to_sdpa(self) -> None:
        assert load(torch.device("mps")) is None

    def test_switched_off_it_is_sdpa(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SHARDLINE_KERNEL", "off")
        assert load(torch.device("cuda")) is None
