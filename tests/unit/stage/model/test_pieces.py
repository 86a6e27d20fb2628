"""The pieces of a decoder, by transformers' plan or by what the model calls, and what replaces
them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from services.stage.model.pieces import NoEmbedding, PassThrough, Pieces
from tests.models import CONFIGS


def test_pieces_come_in_the_order_of_calls_not_of_declarations() -> None:
    assert Pieces.watched(CONFIGS["opt"]()) == Pieces(
        before=("decoder.embed_tokens", "decoder.embed_positions", "decoder.project_in"),
        layers="decoder.layers",
        after=("decoder.project_out", "decoder.final_layer_norm"),
    )


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "cohere2"])
def test_a_plan_says_what_is_seen(name: str) -> None:
    config = CONFIGS[name]()
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(config)

    assert Pieces.planned(model) == Pieces.watched(config)


def test_stubs_return_states_and_add_nothing() -> None:
    ids = torch.arange(3)[None]
    states = torch.randn(1, 3, 8, dtype=torch.bfloat16)

    assert PassThrough()(ids, inputs_embeds=states) is states
    summed: Any = states + NoEmbedding()(ids)
    assert summed.dtype == torch.bfloat16
    assert torch.equal(summed, states)
