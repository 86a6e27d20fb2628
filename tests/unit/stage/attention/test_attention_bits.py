"""The promise that resume rests on: a row's bits depend on its own sequence and position, and on
nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.stage.attention.attention import Attention, MicroBatch, PagedKv, Span
from tests.unit.stage.attention.attending import LAYER, OWN_ORDER, Case, attend, kernels

KERNELS = kernels()
DTYPES = [torch.float32, torch.bfloat16]
ALONE = Case(lengths=[150], num_kv_heads=2, group=3, head_dim=80)
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window, softcap, sinks": {
        "sliding_window": 70,
        "softcap": 20.0,
        "s_aux": torch.linspace(-1, 1, 6),
    },
    "chunks": {"attention_chunk": 40},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def _first(kernel_index: int, case: Case, chunks: list[int], min_rows: int = 1) -> Tensor:
    return attend(KERNELS[kernel_index], case, chunks, min_rows=min_rows)[0]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", range(len(KERNELS)), ids=[kernel.isa for kernel in KERNELS])
class TestRowBits:
    def test_do_not_depend_on_chunks(self, kernel: int, dtype: torch.dtype, layer: str) -> None:
        case = replace(ALONE, dtype=dtype, options=LAYERS[layer])
        whole = _first(kernel, case, [150])
        for chunks in ([1], [37], [2, 64, 1, 5]):
            assert torch.equal(_first(kernel, case, chunks), whole), chunks

    def test_do_not_depend_on_the_batch(self, kernel: int, dtype: torch.dtype, layer: str) -> None:
        case = replace(ALONE, dtype=dtype, options=LAYERS[layer])
        crowd = replace(case, lengths=[150, 9, 140, 64, 1])  # the first sequence is the same
        assert torch.equal(
            _first(kernel, crowd, [1, 30, 8, 64]), _first(kernel, case, [1], min_rows=4)
        )

    def test_do_not_depend_on_threads(self, kernel: int, dtype: torch.dtype, layer: str) -> None:
        crowd = replace(ALONE, lengths=[150, 60, 90], dtype=dtype, options=LAYERS[layer])
        alone = attend(KERNELS[kernel], crowd, [20, 1])
        torch.set_num_threads(3)
        together = attend(KERNELS[kernel], crowd, [20, 1])
        torch.set_num_threads(1)
        assert all(map(torch.equal, alone, together))

    def test_do_not_depend_on_vectors_width(
        self, kernel: int, dtype: torch.dtype, layer: str
    ) -> None:
        case = replace(ALONE, dtype=dtype, options=LAYERS[layer])
        narrowest = len(KERNELS) - 1
        is_own_order = KERNELS[kernel].isa in OWN_ORDER and dtype == torch.bfloat16
        other = kernel if is_own_order else narrowest
        assert torch.equal(_first(kernel, case, [50]), _first(other, case, [150]))

    def test_do_not_depend_on_who_wrote_a_shared_block(
        self, kernel: int, dtype: torch.dtype, layer: str
    ) -> None:
        # Given a sequence of 150 tokens in blocks 3, 0, 2
        case = replace(ALONE, dtype=dtype, options=LAYERS[layer])
        attention = Attention(KERNELS[kernel])
        attention.bind(PagedKv(layers={LAYER: case.shape}, num_blocks=6, dtype=dtype))

        def rows_of(start: int, blocks: list[int]) -> Tensor:
            attention.use(MicroBatch.of([Span(start=start, length=150 - start, blocks=blocks)]))
            query, key, value = (part[None, :, start:] for part in case.rows()[0])
            return attention.attend(case.layer, query, key, value, None, **case.options)[0][0]

        whole = rows_of(0, [3, 0, 2])

        # When another has its first block and computes the rest itself, then its rows are the same
        assert torch.equal(rows_of(64, [3, 5, 1]), whole[64:])


@st.composite
def crowds(draw: st.DrawFn) -> Case:
    """Any layer, for its first sequence and others."""
    layers: list[dict[str, Any]] = [
        {},
        {"sliding_window": 33},
        {"softcap": 5.0},
        {"sliding_window": 64},
        {"attention_chunk": 33},
        {"attention_chunk": 64},
    ]
    dim, value_dim = draw(
        st.sampled_from([(20, 24), (64, None), (80, None), (96, None), (112, None), (192, 128)])
    )
    case = Case(
        lengths=draw(st.lists(st.integers(1, 200), min_size=1, max_size=3)),
        num_kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 2, 4, 7, 12, 20])),
        head_dim=dim,
        value_dim=value_dim,
        dtype=draw(st.sampled_from(DTYPES)),
        options=draw(st.sampled_from(layers)).copy(),
        seed=draw(st.integers(0, 99)),
    )
    if draw(st.booleans()):
        case.options["s_aux"] = torch.linspace(-2, 2, case.num_kv_heads * case.group)
    return case


@pytest.mark.parametrize("kernel", range(len(KERNELS)), ids=[kernel.isa for kernel in KERNELS])
@settings(max_examples=25)
@given(
    case=crowds(),
    chunks=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    threads=st.integers(1, 2),
)
def test_a_row_has_its_bits_in_any_crowd(
    kernel: int, case: Case, chunks: list[int], threads: int
) -> None:
    alone = _first(kernel, replace(case, lengths=case.lengths[:1]), [case.lengths[0]])
    torch.set_num_threads(threads)
    crowded = _first(kernel, case, chunks)
    torch.set_num_threads(1)
    assert torch.equal(crowded, alone)
