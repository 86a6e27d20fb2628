"""The trial of ranks: any number of them computes what the whole model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from services.stage.engine.rank_trial import check_ranks, in_ranks
from services.stage.engine.split_trial import LENGTHS
from services.stage.kernels.kernel import load
from services.stage.model.miniature import build_miniature
from tests.models import CONFIGS

SMALL: dict[str, Any] = {"vocab_size": 96, "num_hidden_layers": 2, "intermediate_size": 320}


@pytest.mark.parametrize("num_ranks", [3, 4, 7])
def test_any_number_of_ranks_is_tried_as_it_will_run(num_ranks: int, tmp_path: Path) -> None:
    native = load()
    assert native is not None
    check_ranks(CONFIGS["llama"](), tmp_path, native, num_ranks)


@pytest.mark.parametrize(
    ("hidden", "heads", "kv_heads", "num_ranks"),
    [(64, 4, 2, 3), (576, 9, 3, 16)],
    ids=["hidden of 4 tiles", "SmolLM2-135M"],
)
@torch.inference_mode()
def test_tiles_that_ranks_cannot_share_stay_whole_on_each(
    hidden: int, heads: int, kv_heads: int, num_ranks: int
) -> None:
    native = load()
    assert native is not None
    config = tf.LlamaConfig(
        hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads, **SMALL
    )
    whole = build_miniature(config)
    ids = [torch.arange(3, 3 + length) for length in LENGTHS]
    expected = torch.cat([whole(input_ids=each[None], use_cache=False).logits[0] for each in ids])

    found = in_ranks(native, num_ranks, whole, ids)

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
