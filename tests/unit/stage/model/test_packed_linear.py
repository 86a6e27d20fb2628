"""Packed linears: same results, less memory, and rows whose bits do not depend on their number."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from services.stage.model.packed_linear import Merged, PackedLinear, Part, pack
from services.stage.model.products import products
from services.stage.model.row_counts import find_buckets

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Thousands of small products: threads would wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


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
    for layer in model.model.layers:
        assert isinstance(layer.mlp.down_proj, PackedLinear)
        assert isinstance(layer.mlp.up_proj, Part)
        assert layer.self_attn.q_proj.merged is layer.self_attn.v_proj.merged


@torch.inference_mode()
def test_layers_of_one_input_are_one_product_whoever_is_asked_first_and_keep_nothing() -> None:
    # Given three layers of one width, whose product counts its calls
    torch.manual_seed(0)
    names = ("q_proj", "k_proj", "v_proj")
    layers = nn.ModuleDict({name: nn.Linear(48, num) for name, num in zip(names, (32, 16, 8), strict=True)})
    original = copy.deepcopy(layers)
    assert pack(layers)
    (merged,) = (module for module in layers.modules() if isinstance(module, Merged))
    seen: list[int] = []
    merged.layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[-2]))

    # When they are asked in any order, one of them for another input in between, or not all of them
    x, other = torch.randn(1, 5, 48), torch.randn(1, 3, 48)
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

    # Then three that are asked for the same rows cost one product, and rows that went by are not held
    assert seen == [5, 5, 3, 5]
    assert kept() is None


@torch.inference_mode()
def test_layers_of_another_width_or_without_a_bias_stay_apart() -> None:
    layers = nn.ModuleDict({"gate_proj": nn.Linear(8, 6), "up_proj": nn.Linear(8, 6, bias=False)})
    assert pack(layers)
    assert all(isinstance(layer, PackedLinear) for layer in layers.values())


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


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_rows_of_a_packed_layer_keep_their_bits_whatever_their_number(dtype: torch.dtype, tmp_path: Path) -> None:
    # Given a layer whose sums are long, told which numbers of rows agree
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 192)).to(dtype)
    assert pack(model)
    (product,), are_all = products(model)
    assert are_all
    buckets = find_buckets([product], machine="here", cache_folder=tmp_path)[product]
    product.use_buckets(buckets)

    # When any number of rows runs, then each row has the bits that it has alone
    assert buckets
    rows = torch.randn(700, 512).to(dtype)
    expected = torch.cat([model(rows[index : index + 1]) for index in range(0, 700, 7)])
    for num in (2, 9, 33, 95, 191, 260, 513, 695):
        assert torch.equal(model(rows[:num])[::7], expected[: -(-num // 7)]), num
    assert torch.equal(model(rows[None, :260])[0], model(rows)[:260])


@torch.inference_mode()
def test_plain_layers_and_routers_see_only_the_rows_that_they_are_told() -> None:
    # Given a plain layer, one stored the other way round, and a router, each of which would note the rows that it sees
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8))

        def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
            seen.append(len(states))
            chances, experts = (states @ self.weight.T).softmax(-1).topk(2)
            return chances, experts

    seen: list[int] = []
    model = nn.ModuleDict({"plain": nn.Linear(8, 5), "other": Conv1D(6, 8), "router": Router()})
    x = torch.randn(1, 200, 8)
    expected = model["plain"](x), model["other"](x), model["router"](x[0])
    found, are_all = products(model)
    assert are_all
    assert {(one.width, one.outputs) for one in found} == {(8, 5), (8, 6), (8, 4)}
    for layer in (model["plain"], model["other"]):
        layer.forward = _noting(layer.forward, seen)
    seen.clear()

    # When they get their buckets
    for one in found:
        one.use_buckets((64,))
    got = model["plain"](x), model["other"](x), model["router"](x[0])

    # Then they give the same, in panels
    assert set(seen) == {64}
    torch.testing.assert_close(got, expected)


def test_a_weight_of_an_unknown_kind_is_not_exact() -> None:
    model = nn.Module()
    model.experts = nn.Parameter(torch.zeros(2, 3, 4))

    assert products(model) == ([], False)


def _noting(run: Callable[[Tensor], Tensor], seen: list[int]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        seen.append(x.shape[-2])
        return run(x)

    return forward
