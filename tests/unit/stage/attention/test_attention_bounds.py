"""What a broken plan may ask of the attention: refused by name, and no memory touched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.stage.attention.attention import Attention, KvShape, MicroBatch, PagedKv, Span
from services.stage.kernels.kernel import Kernel
from shardline.base.errors import Invalid, ProtocolError
from tests.unit.stage.attention.attending import Layer, kernels

KERNELS = kernels()
MODULE = Layer(0)
GOOD = MicroBatch.of([Span(start=70, length=2, blocks=[3, 1]), Span(start=0, length=1, blocks=[2])])


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BROKEN = {
    "a block number past the pool": replace(GOOD, table=_int32(3, 4, 2, -1).view(2, 2)),
    "a negative block number": replace(GOOD, table=_int32(-2, 1, 2, -1).view(2, 2)),
    "a position past the table": replace(GOOD, position=_int32(70, 128, 0)),
    "a negative position": replace(GOOD, position=_int32(70, 71, -5)),
    "a sequence past the table": replace(GOOD, sequence=_int32(0, 0, 2)),
    "a sequence below -1": replace(GOOD, sequence=_int32(0, 0, -7)),
}


def _attend(attention: Attention, micro_batch: MicroBatch) -> tuple[PagedKv, torch.Tensor]:
    kv = PagedKv(
        layers={0: KvShape(num_kv_heads=1, head_dim=16)}, num_blocks=4, dtype=torch.float32
    )
    attention.bind(kv)
    rows = torch.ones(1, 1, 3, 16)
    attention.use(micro_batch)
    return kv, attention.attend(MODULE, rows, rows, rows, None)[0]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.isa)
@pytest.mark.parametrize("what", BROKEN)
def test_the_kernel_refuses_rows_outside_its_tables(kernel: Kernel, what: str) -> None:
    with pytest.raises(ProtocolError, match="packed row"):
        _attend(Attention(kernel), BROKEN[what])


@pytest.mark.parametrize("block", [-1, 4])
def test_sdpa_refuses_blocks_outside_the_pool(block: int) -> None:
    with pytest.raises(ProtocolError, match="4 KV blocks"):
        _attend(Attention(None), MicroBatch.of([Span(start=0, length=3, blocks=[block])]))


@pytest.mark.parametrize(
    "kernel", [*KERNELS, None], ids=lambda kernel: "sdpa" if kernel is None else kernel.isa
)
def test_only_the_rows_of_the_micro_batch_are_written(kernel: Kernel | None) -> None:
    kv, out = _attend(Attention(kernel), GOOD)
    # Three tokens of ones in sixteen dimensions; a value that looks back sees zeros too
    assert int(kv.values[0].count_nonzero()) == int(kv.keys[0].count_nonzero()) == 3 * 16
    assert kv.values[0][1, 0, 6:8].all()
    assert kv.values[0][2, 0, 0].all()
    assert out[0, 2].eq(1).all()


@pytest.mark.parametrize("asked", [{"is_causal": False}, {"position_bias": torch.zeros(1)}])
def test_attention_that_is_not_plainly_causal_is_refused(asked: dict[str, object]) -> None:
    rows = torch.ones(1, 1, 3, 16)
    with pytest.raises(Invalid, match="not plainly causal"):
        Attention(None).attend(MODULE, rows, rows, rows, None, **asked)
