"""A dense model on a device that is not the CPU: nothing of it may be fed rows of the CPU, and none
may be packed.

The device is `meta`, where tensors have shapes and no values; mixing it with the CPU raises as a
GPU does.
"""

from __future__ import annotations

from pathlib import Path

import torch

from services.stage.attention.attention import Attention, PagedKv, Span
from services.stage.engine.exactness import choose_row_buckets
from services.stage.engine.forward import Forward
from services.stage.engine.loading import pack_shard
from services.stage.model.kv_shapes import probe_kv_shapes
from services.stage.model.shard import Shard
from services.stage.products.packing import UNPACKED
from tests.models import save_model


@torch.inference_mode()
def test_a_dense_model_off_the_cpu_runs_rows_as_they_come_and_is_not_exact(tmp_path: Path) -> None:
    # Given a shard there, not the last: a tail tries its last layer on values
    attention = Attention(None)
    meta = torch.device("meta")
    shard = Shard.load(
        save_model(tmp_path),
        range(3),
        dtype=torch.bfloat16,
        attn_implementation=attention.name,
        device=meta,
    )
    kv_shapes = probe_kv_shapes(shard)

    # When its row buckets are chosen as the executor does
    pack_shard(shard, UNPACKED)
    padding, exact = choose_row_buckets(shard, can_be_exact=True, cache_folder=tmp_path)
    kv = PagedKv(layers=kv_shapes, num_blocks=2, dtype=torch.bfloat16, device=meta)
    forward = Forward(shard, attention, kv, padding)

    # Then it runs, unpadded
    assert (exact, padding.padded(7)) == (False, 7)
    ids = torch.zeros(7, dtype=torch.long, device=meta)
    assert forward.sampled_outputs([Span(start=0, length=7, blocks=[0])], ids, [6]).shape == (
        1,
        shard.info.hidden_size,
    )
