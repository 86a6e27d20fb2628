"""The promise that resume rests on: a row's bits depend on its own sequence and position, and on nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.unit.stage.attention.attending import Case, attend, kernels

KERNELS = kernels()
DTYPES = [torch.float32, torch.bfloat16]
ALONE = Case(lengths=[150], num_kv_heads=2, group=3, head_dim=80)
LAYERS = {
    "plain": {},
    "window, softcap, sinks": {"sliding_window": 70, "softcap": 20.0, "s_aux": torch.linspace(-1, 1, 6)},
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
        assert torch.equal(_first(kernel, crowd, [1, 30, 8, 64]), _first(kernel, case, [1], min_rows=4))

    def test_do_not_depend_on_threads(self, kernel: int, dtype: torch.dtype, layer: str) -> None:
        crowd = replace(ALONE, lengths=[150, 60, 90], dtype=dtype, options=LAYERS[layer])
        alone = attend(KERNELS[kernel], crowd, [20, 1])
        torch.set_num_threads(3)
        together = attend(KERNELS[kernel], crowd, [20, 1])
        torch.set_num_threads(1)
        assert all(map(torch.equal, alone, together))

    def test_do_not_depend_on_the_instruction_set(self, kernel: int, dtype: torch.dtype, layer: str) -> None:
        case = replace(ALONE, dtype=dtype, options=LAYERS[layer])
        assert torch.equal(_first(kernel, case, [50]), _first(0, case, [150]))
