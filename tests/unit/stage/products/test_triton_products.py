"""Products and norms of GPUs: against float64, and their promise that a row's bits depend on
nothing else.

Run in Triton's interpreter, or compiled on the device that SHARDLINE_TEST_DEVICE names.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from services.stage.kernels.kernel import GateActivation
from services.stage.products import triton_products
from services.stage.products.fused import FusedMlp, fuse, fuse_norms
from services.stage.products.packing import Part, pack, triton_packing
from services.stage.products.triton_products import (
    FEW_ROWS,
    INPUT_BYTES,
    LARGER,
    WIDE,
    Tile,
    TritonLinear,
    TritonParts,
    TritonRmsNorm,
    are_covered,
    stages_of,
    tile_of,
)
from tests.models import CONFIGS

DEVICE = os.environ.get("SHARDLINE_TEST_DEVICE", "cpu")
ROUNDINGS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
dtypes = st.sampled_from(list(ROUNDINGS))


def draw(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Values of a usual size, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def linear(num_outputs: int, num_inputs: int, dtype: torch.dtype, *, bias: bool) -> TritonLinear:
    """A layer with random weights."""
    return TritonLinear(
        draw(num_outputs, num_inputs, dtype=dtype, seed=2),
        draw(num_outputs, dtype=dtype, seed=3) if bias else None,
    )


@settings(max_examples=15)
@given(
    num_rows=st.integers(1, 150),
    num_inputs=st.integers(1, 200),
    num_outputs=st.integers(1, 150),
    dtype=dtypes,
    bias=st.booleans(),
)
def test_any_product_matches_float64(
    num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, bias: bool
) -> None:
    layer = linear(num_outputs, num_inputs, dtype, bias=bias)
    x = draw(1, num_rows, num_inputs, dtype=dtype)

    found = layer(x)

    expected = x.double() @ layer.weight.double().T + (
        layer.bias.double() if layer.bias is not None else 0
    )
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), expected, rtol=ROUNDINGS[dtype], atol=20 * ROUNDINGS[dtype]
    )


@settings(max_examples=15)
@given(
    num_rows=st.integers(1, 200),
    num_inputs=st.integers(1, 200),
    num_outputs=st.integers(1, 100),
    dtype=dtypes,
    data=st.data(),
)
def test_a_rows_product_has_its_bits_alone_and_in_any_crowd(
    num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, data: Any
) -> None:
    layer = linear(num_outputs, num_inputs, dtype, bias=True)
    x = draw(num_rows, num_inputs, dtype=dtype)
    whole = layer(x)
    first = data.draw(st.integers(0, num_rows - 1))
    end = data.draw(st.integers(first + 1, num_rows))

    assert torch.equal(layer(x[first : first + 1]), whole[first : first + 1])
    assert torch.equal(layer(x[first:end]), whole[first:end])


def test_infinities_of_a_row_leave_other_rows_alone() -> None:
    layer = linear(70, 100, torch.float16, bias=False)
    x = draw(20, 100, dtype=torch.float16)
    expected = layer(x)
    x[3] = torch.inf

    assert torch.equal(layer(x)[4:], expected[4:])


def test_rows_that_lie_apart_are_read_as_they_are_meant() -> None:
    layer = linear(33, 48, torch.bfloat16, bias=False)
    wide = draw(9, 100, dtype=torch.bfloat16)
    x = wide[:, 3:51]

    assert torch.equal(layer(x), layer(x.clone()))


@settings(max_examples=15)
@given(
    kind=st.sampled_from([LlamaRMSNorm, Gemma2RMSNorm, Olmo2RMSNorm]),
    num_rows=st.integers(1, 90),
    width=st.integers(1, 300),
    dtype=dtypes,
)
def test_a_norm_rounds_where_the_model_does_and_keeps_a_rows_bits(
    kind: type[nn.Module], num_rows: int, width: int, dtype: torch.dtype
) -> None:
    norm = nn.Module.to(kind(width), device=DEVICE, dtype=dtype)
    x = draw(num_rows, width, dtype=dtype)
    norm.load_state_dict({"weight": draw(width, dtype=dtype, seed=2)})
    model = nn.ModuleDict({"norm": norm})
    expected = norm(x)

    assert fuse_norms(model, TritonRmsNorm) == 1

    found = model["norm"](x)
    torch.testing.assert_close(found, expected, rtol=ROUNDINGS[dtype], atol=ROUNDINGS[dtype])
    row = num_rows // 2
    assert torch.equal(model["norm"](x[row : row + 1]), found[row : row + 1])
    assert torch.equal(model["norm"](x[row:]), found[row:])


@settings(max_examples=10)
@given(
    num_rows=st.integers(1, 40), width=st.integers(1, 1100), apart=st.integers(0, 9), dtype=dtypes
)
def test_a_gated_activation_rounds_where_the_model_does(
    num_rows: int, width: int, apart: int, dtype: torch.dtype
) -> None:
    wide = 4 * draw(num_rows, 2 * width + apart, dtype=dtype)
    gate, up = wide[:, :width], wide[:, width + apart :]

    found = TritonParts(torch.device(DEVICE)).gate_mul(gate, up, GateActivation.SILU)

    roundings = 2 * ROUNDINGS[dtype]
    torch.testing.assert_close(found, nn.functional.silu(gate) * up, rtol=roundings, atol=roundings)


@settings(max_examples=10)
@given(
    num_rows=st.integers(1, 20),
    num_heads=st.integers(1, 19),
    half=st.sampled_from([3, 32, 40, 64]),
    apart=st.integers(0, 9),
    dtype=dtypes,
)
def test_heads_are_rotated_as_the_model_does(
    num_rows: int, num_heads: int, half: int, apart: int, dtype: torch.dtype
) -> None:
    wide = draw(1, num_rows, num_heads * 2 * half + apart, dtype=dtype)
    x = wide[..., apart:].unflatten(-1, (num_heads, 2 * half)).transpose(1, 2)
    cos, sin = (draw(1, num_rows, 2 * half, dtype=dtype, seed=seed) for seed in (5, 6))

    found = TritonParts(torch.device(DEVICE)).rotate(x, cos, sin, neighbors=False)

    # Two products of values up to 4 nearly cancel: what rounding leaves of them is larger than the
    # difference.
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    roundings = 2 * ROUNDINGS[dtype]
    torch.testing.assert_close(found, expected, rtol=roundings, atol=4 * roundings)


@pytest.mark.parametrize("tile", [FEW_ROWS, WIDE, *LARGER])
@pytest.mark.parametrize("shared_kib", [48, 64, 99, 227])
def test_what_a_program_fetches_ahead_fits_its_memory(tile: Tile, shared_kib: int) -> None:
    num_stages = stages_of(tile, shared_kib << 10)

    assert 1 <= num_stages <= tile.num_stages
    assert num_stages * (tile.rows + tile.outputs) * INPUT_BYTES <= shared_kib << 10


@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "tile"),
    [
        (1, 28_672, FEW_ROWS),
        (64, 28_672, FEW_ROWS),
        (96, 2_048, FEW_ROWS),
        (96, 6_144, LARGER[1]),
        (128, 28_672, LARGER[0]),
        (512, 4_096, LARGER[0]),
    ],
)
def test_tiles_are_as_large_as_leaves_programs_for_the_whole_gpu(
    num_rows: int, num_outputs: int, tile: Tile
) -> None:
    assert tile_of(num_rows, num_outputs, 2) is tile


@pytest.mark.parametrize("tile", LARGER)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_tile_gives_a_row_the_same_bits(
    tile: Tile, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = linear(150, 700, dtype, bias=True)
    x = draw(200, 700, dtype=dtype)
    expected = layer(x)

    monkeypatch.setattr(triton_products, "tile_of", lambda *_: tile)

    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "gemma2"])
@torch.inference_mode()
def test_a_packed_model_says_the_same_and_shares_a_tied_weight(name: str) -> None:
    torch.manual_seed(4)
    model = (
        tf.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).eval().to(DEVICE)
    )
    ids = torch.arange(3, 13, device=DEVICE)[None]
    expected = model(ids, use_cache=False).logits

    pack(model, triton_packing())
    fuse(model, TritonParts(torch.device(DEVICE)))

    torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
    assert are_covered(model)
    assert isinstance(model.model.layers[0].self_attn.q_proj, Part)
    assert isinstance(model.model.layers[0].mlp, FusedMlp) is (name != "gemma2")
    is_shared = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert is_shared is model.config.tie_word_embeddings


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("phi", ["LayerNorm"]),
        ("cohere", ["CohereLayerNorm"]),
        ("mixtral", ["MixtralExperts", "MixtralTopKRouter"]),
        ("gpt-oss", ["GptOssExperts", "GptOssTopKRouter"]),
    ],
)
def test_what_torch_still_computes_is_named(name: str, left: list[str]) -> None:
    model = (
        tf.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).eval().to(DEVICE)
    )
    pack(model, triton_packing())
    fuse_norms(model, TritonRmsNorm)

    with capture_logs() as logs:
        assert not are_covered(model)

    assert logs[0]["parts"] == left
