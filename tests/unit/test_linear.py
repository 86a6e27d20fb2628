"""Packed linears: same results, less memory, and a probe that knows when neighbours change a row's bits."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from services.stage.engine.linear import PackedLinear, fewest_rows, min_rows, pack

DTYPES = [torch.float32, torch.bfloat16]


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tied", [True, False])
@torch.inference_mode()
def test_a_packed_model_says_the_same(dtype: torch.dtype, tied: bool) -> None:
    model = _llama(dtype, tied=tied)
    ids = torch.arange(20)[None]
    expected = model(ids).logits
    assert pack(model)
    torch.testing.assert_close(model(ids).logits, expected, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0)
    assert isinstance(model.lm_head, PackedLinear) is not tied
    assert all(isinstance(layer.mlp.up_proj, PackedLinear) for layer in model.model.layers)


@torch.inference_mode()
def test_layers_stored_the_other_way_round_are_packed_too() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=2, n_layer=1, vocab_size=50)).eval()
    ids = torch.arange(9)[None]
    expected = model(ids).logits
    assert pack(model)
    assert isinstance(model.transformer.h[0].attn.c_attn, PackedLinear)
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_a_tail_that_looks_no_token_up_packs_its_tied_head() -> None:
    model = _llama(torch.float32, tied=True)
    hidden = torch.randn(3, 48)
    expected = model.lm_head(hidden)
    assert pack(model, uses_embedding=False)
    torch.testing.assert_close(model.lm_head(hidden), expected)
    assert model.model.embed_tokens.weight.numel() == 0


def test_the_original_weights_are_freed() -> None:
    model = _llama(torch.float32, tied=False)
    originals = [weakref.ref(module.weight) for module in model.modules() if isinstance(module, nn.Linear)]
    assert pack(model)
    gc.collect()
    assert not any(original() is not None for original in originals)


def test_what_cannot_be_packed_stays() -> None:
    model = nn.Sequential(nn.Linear(8, 8)).half()
    assert not pack(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_rows_of_a_packed_layer_keep_their_bits_from_min_rows_on(dtype: torch.dtype) -> None:
    # Given a layer whose sums are long
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2048, 129)).to(dtype)
    assert pack(model)

    # When the probe says how many rows it needs
    fewest = min_rows(model)

    # Then every larger batch gives the same bits
    assert fewest is not None
    rows = torch.randn(200, 2048).to(dtype)
    expected = model(rows)
    for num in range(fewest, 90, 7):
        assert torch.equal(model(rows[5 : 5 + num]), expected[5 : 5 + num]), num


def test_the_probe_finds_where_bits_begin_to_hold() -> None:
    def changes_below_nine(x: Tensor) -> Tensor:
        return x + (x.shape[0] < 9)

    def always_changes(x: Tensor) -> Tensor:
        return x + x.shape[0]

    assert fewest_rows(changes_below_nine, 4, torch.float32) == 16  # the next rung
    assert fewest_rows(always_changes, 4, torch.float32) is None
    assert fewest_rows(lambda x: x, 4, torch.float32) == 2


def test_stacked_experts_are_not_exact() -> None:
    model = nn.Module()
    model.experts = nn.Parameter(torch.zeros(2, 3, 4))
    assert min_rows(model) is None
