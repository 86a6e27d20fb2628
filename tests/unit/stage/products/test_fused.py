"""Fused elementwise parts: what they stand for says the same without them, and a row's bits are its
own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers.models.cohere import modeling_cohere
from transformers.models.ernie4_5 import modeling_ernie4_5
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.glm4 import modeling_glm4
from transformers.models.llama import modeling_llama
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.phi3 import modeling_phi3

from services.stage.kernels.kernel import GateActivation, Kernel
from services.stage.products.fused import FusedMlp, FusedRmsNorm, NativeParts, Rotary, fuse
from services.stage.products.fused_gelu import fuse_gelus
from tests.models import COMMON, CONFIGS
from tests.unit.stage.attention.attending import kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NORMS = [modeling_llama.LlamaRMSNorm, modeling_gemma2.Gemma2RMSNorm, modeling_olmo2.Olmo2RMSNorm]
WIDTHS = [8, 33, 1024]
ROWS = 70


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """How one modeling file turns queries and keys."""

    modeling: ModuleType
    attention: type[nn.Module]
    config: type[tf.PreTrainedConfig]
    is_partial: bool = False
    has_float_tables: bool = False

    @property
    def original(self) -> Any:
        """The modeling file's function."""
        return self.modeling.apply_rotary_pos_emb


ROTATIONS = {
    "halves": Rotation(
        modeling=modeling_llama, attention=modeling_llama.LlamaAttention, config=tf.LlamaConfig
    ),
    "halves of a part": Rotation(
        modeling=modeling_phi3,
        attention=modeling_phi3.Phi3Attention,
        config=tf.Phi3Config,
        is_partial=True,
    ),
    "halves in float32": Rotation(
        modeling=modeling_olmo2,
        attention=modeling_olmo2.Olmo2Attention,
        config=tf.Olmo2Config,
        has_float_tables=True,
    ),
    "neighbors in a part": Rotation(
        modeling=modeling_glm4,
        attention=modeling_glm4.Glm4Attention,
        config=tf.Glm4Config,
        is_partial=True,
    ),
    "neighbors in float32": Rotation(
        modeling=modeling_ernie4_5,
        attention=modeling_ernie4_5.Ernie4_5Attention,
        config=tf.Ernie4_5Config,
        has_float_tables=True,
    ),
}

pytestmark = pytest.mark.usefixtures("inference")


def draw(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Values of a usual size, some of them large."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (values * torch.where(values.abs() > 2, 30.0, 1.0)).to(dtype)


def fused(module: nn.Module, kernel: Kernel) -> nn.Module:
    """The part that replaces it in a model."""
    parent = nn.ModuleDict({"part": module})
    assert fuse(parent, NativeParts(kernel)) == 1
    return parent["part"]


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """All but a few values equal, and those by one rounding: sums run in another order."""
    roundings = 4 * torch.finfo(theirs.dtype).eps
    torch.testing.assert_close(ours, theirs, rtol=roundings, atol=roundings)
    if theirs.dtype != torch.float32:
        assert (ours != theirs).float().mean() < 0.01


def mlp(dtype: torch.dtype, act: str = "silu", width: int = 77) -> nn.Module:
    """A small one with random weights."""
    torch.manual_seed(3)
    config = tf.LlamaConfig(hidden_size=32, intermediate_size=width, hidden_act=act)
    return nn.Module.to(modeling_llama.LlamaMLP(config), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.__name__)
def test_a_fused_norm_rounds_where_the_model_does(
    norm: type[nn.Module], width: int, dtype: torch.dtype, kernel: Kernel
) -> None:
    module = nn.Module.to(norm(width), dtype)
    module.load_state_dict({"weight": draw(width, dtype=dtype, seed=2)})
    x = draw(ROWS, width, dtype=dtype)

    ours = fused(module, kernel)

    assert isinstance(ours, FusedRmsNorm)
    assert_same(ours(x), module(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("act", "activation"),
    [
        ("silu", GateActivation.SILU),
        ("gelu", GateActivation.GELU),
        ("gelu_pytorch_tanh", GateActivation.GELU_TANH),
    ],
)
def test_a_fused_mlp_gives_the_same(
    act: str, activation: GateActivation, dtype: torch.dtype, kernel: Kernel
) -> None:
    module = mlp(dtype, act)
    x = draw(ROWS, 32, dtype=dtype)
    expected = module(x)

    fuse_gelus(module, kernel)
    ours = fused(module, kernel)

    assert isinstance(ours, FusedMlp)
    assert ours.activation is activation
    torch.testing.assert_close(ours(x), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_and_up_may_be_one_product(dtype: torch.dtype, kernel: Kernel) -> None:
    torch.manual_seed(3)
    config = tf.Phi3Config(hidden_size=32, intermediate_size=77)
    module = nn.Module.to(modeling_phi3.Phi3MLP(config), dtype)
    x = draw(ROWS, 32, dtype=dtype)

    ours = fused(module, kernel)

    assert isinstance(ours, FusedMlp)
    torch.testing.assert_close(ours(x), module(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [6, 64, 80])
@pytest.mark.parametrize("way", ROTATIONS)
def test_rotated_heads_have_the_models_bits(
    way: str, dim: int, dtype: torch.dtype, kernel: Kernel
) -> None:
    rotation = ROTATIONS[way]
    query_and_key = [
        draw(1, ROWS, num_heads, dim, dtype=dtype).transpose(1, 2) for num_heads in (4, 2)
    ]
    size = dim // 2 if rotation.is_partial and dim % 4 == 0 else dim
    tables = torch.float32 if rotation.has_float_tables else dtype
    cos_and_sin = [draw(1, ROWS, size, dtype=tables, seed=seed) for seed in (5, 6)]
    attention = rotation.attention(rotation.config(**COMMON), 0)
    assert fuse(nn.ModuleDict({"attention": attention}), NativeParts(kernel)) >= 1
    rotary = attention.forward.__globals__["apply_rotary_pos_emb"]

    ours = rotary(*query_and_key, *cos_and_sin)
    theirs = rotation.original(*query_and_key, *cos_and_sin)

    assert isinstance(rotary, Rotary)
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_views_of_one_wide_product_are_read_in_place(
    dtype: torch.dtype, kernel: Kernel
) -> None:
    # Given query, key, and the two inputs of an MLP's product, side by side in memory
    wide = draw(1, ROWS, 6 * 64, dtype=dtype)
    query, key = (
        part.unflatten(-1, (-1, 64)).transpose(1, 2)
        for part in wide.split([4 * 64, 2 * 64], dim=-1)
    )
    cos_and_sin = [draw(1, ROWS, 64, dtype=dtype, seed=seed) for seed in (5, 6)]
    module = mlp(dtype)
    ours = fused(module, kernel)
    for name, first in (("gate_proj", 0), ("up_proj", 77)):
        module.get_submodule(name).register_forward_hook(
            lambda *_, first=first: wide[..., first : first + 77]
        )

    # When each runs
    not_called = partial(pytest.fail, "not recognized")
    rotated = Rotary(NativeParts(kernel), not_called, neighbors=False)(query, key, *cos_and_sin)

    # Then no view is taken for dense rows
    expected = modeling_llama.apply_rotary_pos_emb(query, key, *cos_and_sin)
    assert all(torch.equal(mine, other) for mine, other in zip(rotated, expected, strict=True))
    x = draw(ROWS, 32, dtype=dtype)
    torch.testing.assert_close(ours(x), module(x))


def test_heads_side_by_side_are_rotated_by_the_models_function(kernel: Kernel) -> None:
    query_and_key = [draw(1, num_heads, ROWS, 64, dtype=torch.float32) for num_heads in (4, 2)]
    cos_and_sin = [draw(1, ROWS, 64, dtype=torch.float32, seed=seed) for seed in (5, 6)]

    theirs = modeling_llama.apply_rotary_pos_emb(*query_and_key, *cos_and_sin)

    rotary = Rotary(NativeParts(kernel), lambda *_: theirs, neighbors=False)
    assert rotary(*query_and_key, *cos_and_sin) is theirs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_fused_row_keeps_its_bits_beside_others(
    threads: int, dtype: torch.dtype, kernel: Kernel
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    norm = fused(nn.Module.to(modeling_llama.LlamaRMSNorm(1000), dtype), kernel)
    x = draw(ROWS, 1000, dtype=dtype)
    try:
        whole = norm(x)
        assert all(
            torch.equal(norm(x[row : row + 3]), whole[row : row + 3])
            for row in range(0, ROWS - 3, 7)
        )
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_instruction_set_gives_the_same_bits(dtype: torch.dtype) -> None:
    norm = nn.Module.to(modeling_llama.LlamaRMSNorm(333), dtype)
    x = draw(ROWS, 333, dtype=dtype)
    gate = mlp(dtype, width=333)
    states = draw(ROWS, 32, dtype=dtype)

    norms = [fused(norm, kernel)(x) for kernel in kernels()]
    gates = [fused(gate, kernel)(states) for kernel in kernels()]

    assert all(torch.equal(one, norms[0]) for one in norms)
    assert all(torch.equal(one, gates[0]) for one in gates)


def test_a_nan_stays_a_nan(kernel: Kernel) -> None:
    x = torch.ones(2, 40, dtype=torch.bfloat16)
    x[0, 7] = torch.nan

    out = fused(modeling_llama.LlamaRMSNorm(40).bfloat16(), kernel)(x)

    assert out[0].isnan().all()
    assert not out[1].isnan().any()


@pytest.mark.parametrize(
    "module",
    [nn.LayerNorm(32), nn.RMSNorm(32, elementwise_affine=False), mlp(torch.float32, act="gelu")],
    ids=["LayerNorm", "without-weight", "gelu"],
)
def test_other_modules_are_not_fused(module: nn.Module, kernel: Kernel) -> None:
    parent = nn.ModuleDict({"part": module})

    assert fuse(parent, NativeParts(kernel)) == 0
    assert parent["part"] is module


def test_positions_of_a_model_with_another_rotation_are_not_fused(kernel: Kernel) -> None:
    layer = modeling_cohere.CohereAttention(tf.CohereConfig(**COMMON), 0)

    assert fuse(nn.ModuleDict({"attention": layer}), NativeParts(kernel)) == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_every_fused_architecture_gives_the_same(name: str) -> None:
    torch.manual_seed(4)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).eval()
    ids = torch.arange(3, 43)[None]
    expected = model(ids, use_cache=False).logits

    num_fused = fuse(model, NativeParts(kernels()[0]))

    torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
    assert num_fused >= {"llama": 17, "qwen3": 25, "gemma3": 29}.get(name, 0)
