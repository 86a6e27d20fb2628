"""Packing a model: same results, less memory, layers of one input as one product."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from services.stage.kernels import kernel
from services.stage.kernels.kernel import Weights
from services.stage.products.packing import (
    MergedLinear,
    Part,
    pack,
    packed_bytes,
    packing_for,
    unshare_embedding,
)
from services.stage.products.tiled_linear import Int8Embedding, TiledEmbedding, TiledLinear
from shardline.base.errors import Invalid

KERNEL = kernel.load()
FLOAT32 = packing_for(torch.float32, KERNEL)
PACKINGS = {
    "float32": (FLOAT32, torch.float32, 1e-5),
    "bfloat16": (packing_for(torch.bfloat16, KERNEL), torch.bfloat16, 2e-2),
    "int8": (packing_for(torch.bfloat16, KERNEL, Weights.INT8), torch.bfloat16, 6e-2),
    "int4": (packing_for(torch.bfloat16, KERNEL, Weights.INT4), torch.bfloat16, 0.5),
}
"""The packing, the dtype of its models, and how far their logits may lie apart."""


def _llama(dtype: torch.dtype, *, tied: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=77,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=101,
        tie_word_embeddings=tied,
        attention_bias=True,
    )
    model: PreTrainedModel = LlamaForCausalLM(config)
    return nn.Module.to(model, dtype).eval()


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("tied", [True, False])
@torch.inference_mode()
def test_a_packed_model_says_the_same(packing: str, tied: bool) -> None:
    used, dtype, atol = PACKINGS[packing]
    model = _llama(dtype, tied=tied)
    ids = torch.arange(20)[None]
    expected = model(ids).logits
    pack(model, used)
    torch.testing.assert_close(model(ids).logits, expected, atol=atol, rtol=0)
    assert isinstance(model.lm_head, TiledLinear) is not tied
    for layer in model.model.layers:
        assert isinstance(layer.mlp.down_proj, TiledLinear)
        assert isinstance(layer.mlp.up_proj, Part)
        assert layer.self_attn.q_proj.merged is layer.self_attn.v_proj.merged


@torch.inference_mode()
def test_layers_of_one_input_are_one_product_whoever_is_asked_first_and_keep_nothing() -> None:
    # Given three layers of one width, whose product counts its calls
    torch.manual_seed(0)
    names = ("q_proj", "k_proj", "v_proj")
    layers = nn.ModuleDict(
        {name: nn.Linear(48, num) for name, num in zip(names, (32, 16, 8), strict=True)}
    )
    original = copy.deepcopy(layers)
    pack(layers, FLOAT32)
    (merged,) = (module for module in layers.modules() if isinstance(module, MergedLinear))
    seen: list[int] = []
    merged.layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[-2]))

    # When they are asked in any order, one of them for another input in between, or not all of them
    x = torch.randn(1, 5, 48)
    other = torch.randn(1, 3, 48)
    asked = [
        ("v_proj", x),
        ("q_proj", x),
        ("k_proj", x),
        ("q_proj", x),
        ("q_proj", other),
        ("k_proj", x),
        ("v_proj", x),
    ]
    for name, rows in asked:
        torch.testing.assert_close(layers[name](rows), original[name](rows))
    kept = weakref.ref(other)
    del other, asked, rows

    # Then three that are asked for the same rows cost one product, and rows that went by are not
    # held
    assert seen == [5, 5, 3, 5]
    assert kept() is None


@torch.inference_mode()
def test_layers_of_another_width_or_without_a_bias_stay_apart() -> None:
    layers = nn.ModuleDict({"gate_proj": nn.Linear(8, 6), "up_proj": nn.Linear(8, 6, bias=False)})
    pack(layers, FLOAT32)
    assert all(isinstance(layer, TiledLinear) for layer in layers.values())


@torch.inference_mode()
def test_layers_stored_the_other_way_round_are_packed_too() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=2, n_layer=1, vocab_size=50)).eval()
    ids = torch.arange(9)[None]
    expected = model(ids).logits
    pack(model, FLOAT32)
    assert isinstance(model.transformer.h[0].attn.c_attn, TiledLinear)
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_a_tail_that_looks_no_token_up_packs_its_tied_head() -> None:
    model = _llama(torch.float32, tied=True)
    hidden = torch.randn(3, 48)
    expected = model.lm_head(hidden)
    pack(model, FLOAT32, uses_embedding=False)
    torch.testing.assert_close(model.lm_head(hidden), expected)
    assert model.model.embed_tokens.weight.numel() == 0


def test_the_original_weights_are_freed() -> None:
    model = _llama(torch.float32, tied=False)
    originals = [
        weakref.ref(module.weight) for module in model.modules() if isinstance(module, nn.Linear)
    ]
    pack(model, FLOAT32)
    gc.collect()
    assert not any(original() is not None for original in originals)


def test_what_cannot_be_packed_stays() -> None:
    model = nn.Sequential(nn.Linear(8, 8)).half()
    packing = packing_for(torch.float16, KERNEL)
    pack(model, packing)
    assert packing.name == "none"
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("packing", PACKINGS)
@torch.inference_mode()
def test_an_embedding_of_its_own_lets_a_tied_head_be_packed(packing: str) -> None:
    # Given a model whose embedding is its output layer's weight
    used, dtype, atol = PACKINGS[packing]
    model = _llama(dtype, tied=True)
    ids = torch.arange(20)[None]
    expected = model(ids).logits

    # When the embedding gets a weight of its own, and the rest is packed
    unshare_embedding(model, used)
    pack(model, used)

    # Then it says the same, and of integers nothing is left in another dtype
    torch.testing.assert_close(model(ids).logits, expected, atol=atol, rtol=0)
    assert isinstance(model.lm_head, TiledLinear)
    embedding = model.model.embed_tokens
    kinds = {"int8": Int8Embedding, "int4": TiledEmbedding}
    assert type(embedding) is kinds.get(packing, nn.Embedding)
    if used.integers is not None:
        assert max(parameter.dim() for parameter in model.parameters()) == 1


@pytest.mark.parametrize(
    ("packing", "weight_bytes", "outer_bytes"), [("int8", 1, 1), ("int4", 20 / 32, 34 / 32)]
)
def test_what_integers_will_take_is_known_before_they_are_packed(
    packing: str, weight_bytes: float, outer_bytes: float
) -> None:
    # Given linear layers and an embedding, and experts stacked in one weight, which keep their
    # dtype
    model = _llama(torch.bfloat16, tied=False)
    experts = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    integers = PACKINGS[packing][0]
    num_weights = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
    num_outer = 2 * model.lm_head.weight.numel()
    model.register_parameter("experts", nn.Parameter(experts))

    saved = packed_bytes(model, FLOAT32) - packed_bytes(model, integers)
    in_layers = (num_weights - num_outer) * (2 - weight_bytes)
    outer = num_outer * (2 - outer_bytes)
    assert saved == pytest.approx(in_layers + outer, abs=20)  # each weight rounded up


@pytest.mark.parametrize("integers", [Weights.INT8, Weights.INT4])
def test_integers_without_kernels_are_refused_with_the_remedy(integers: Weights) -> None:
    with pytest.raises(Invalid, match=f"{integers.name.lower()} needs the CPU kernels"):
        packing_for(torch.bfloat16, None, integers)
