"""A narrowed last layer: the same logits, and the same keys and values for the rows that come
after."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.stage.attention.attention import Attention, PagedKv, Span
from services.stage.engine.forward import Forward
from services.stage.kernels import kernel
from services.stage.model.kv_shapes import probe_kv_shapes
from services.stage.model.shard import Shard
from services.stage.products.row_buckets import RowPadding
from tests.models import save_model

NUM_TOKENS = 40
PROMPT = Span(start=0, length=NUM_TOKENS, blocks=[0])
BESIDE = Span(start=0, length=30, blocks=[1])
NEXT = Span(start=NUM_TOKENS, length=1, blocks=[0])


@pytest.fixture(params=["llama", "gemma2", "gemma3", "gpt-oss", "cohere2", "gpt-neox"])
def forward(request: pytest.FixtureRequest, tmp_path: Path) -> Forward:
    """A whole model in one shard."""
    attention = Attention(kernel.load())
    folder = save_model(tmp_path, request.param)
    cpu = torch.device("cpu")
    with torch.inference_mode():
        shard = Shard.load(
            folder, range(4), dtype=torch.float32, attn_implementation=attention.name, device=cpu
        )
        kv = PagedKv(layers=probe_kv_shapes(shard), num_blocks=2, dtype=torch.float32)
        return Forward(shard, attention, kv, RowPadding())


def ids(spans: list[Span]) -> Tensor:
    """One for each packed row."""
    return torch.tensor(
        [
            3 + (7 * position) % 90
            for span in spans
            for position in range(span.start, span.start + span.length)
        ]
    )


@torch.inference_mode()
def test_the_few_wanted_rows_of_a_prefill_have_the_logits_of_all(forward: Forward) -> None:
    spans = [PROMPT, BESIDE]
    sampled_rows = [NUM_TOKENS - 1, NUM_TOKENS + BESIDE.length - 1]
    everything = forward.sampled_outputs(spans, ids(spans), list(range(NUM_TOKENS + BESIDE.length)))

    torch.testing.assert_close(
        forward.sampled_outputs(spans, ids(spans), sampled_rows),
        everything[sampled_rows],
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("asked", [True, False], ids=["narrowed", "written"])
@torch.inference_mode()
def test_a_row_after_a_narrowed_prefill_attends_to_all_of_it(forward: Forward, asked: bool) -> None:
    forward.sampled_outputs([PROMPT], ids([PROMPT]), list(range(NUM_TOKENS)))
    expected = forward.sampled_outputs([NEXT], ids([NEXT]), [0])
    for store in (*forward.kv.keys.values(), *forward.kv.values.values()):
        store.zero_()

    if asked:
        forward.sampled_outputs([PROMPT], ids([PROMPT]), [NUM_TOKENS - 1])
    else:
        forward.write([PROMPT], ids([PROMPT]))

    torch.testing.assert_close(
        forward.sampled_outputs([NEXT], ids([NEXT]), [0]), expected, rtol=1e-5, atol=1e-5
    )


@torch.inference_mode()
def test_the_last_layers_mlp_sees_only_wanted_rows(forward: Forward) -> None:
    seen: list[int] = []
    mlp = forward.shard.layer_modules[3].get_submodule("mlp")
    mlp.register_forward_pre_hook(lambda _module, args: seen.append(args[0].shape[-2]))

    forward.sampled_outputs([PROMPT], ids([PROMPT]), [NUM_TOKENS - 1])
    forward.write([PROMPT], ids([PROMPT]))

    assert len(seen) == 1
    assert seen[0] < NUM_TOKENS
