"""LayerNorm and GELU in one pass: the values of torch's, and a row's bits are its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers.activations import ACT2FN

from services.stage.kernels.kernel import Kernel
from services.stage.products.fused_gelu import FusedGelu, fuse_gelus
from services.stage.products.fused_layer_norm import FusedLayerNorm, fuse_layer_norms
from tests.encoders import CONFIGS, POOLED
from tests.unit.stage.attention.attending import kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [8, 33, 1000]
ROWS = 70
BY_TANH = {"gelu": False, "gelu_pytorch_tanh": True}

pytestmark = pytest.mark.usefixtures("inference")


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    """Values whose mean is not 0, some of them large."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.5
    return (values * torch.where(values.abs() > 2, 30.0, 1.0)).to(dtype)


def layer_norm(width: int, dtype: torch.dtype, *, bias: bool = True) -> nn.Module:
    """One of drawn weights."""
    module = nn.LayerNorm(width, bias=bias)
    for seed, parameter in enumerate(module.parameters()):
        parameter.copy_(draw(width, seed=seed))
    return module.to(dtype)


def fused_norm(module: nn.Module, kernel: Kernel) -> FusedLayerNorm:
    """What replaces it in a model."""
    parent = nn.ModuleDict({"part": module})
    assert fuse_layer_norms(parent, kernel) == 1
    fused = parent["part"]
    assert isinstance(fused, FusedLayerNorm)
    return fused


def fused_gelu(name: str, kernel: Kernel) -> FusedGelu:
    """What replaces transformers' activation of this name in a model."""
    parent = nn.ModuleDict({"part": ACT2FN[name]})
    assert fuse_gelus(parent, kernel) == 1
    fused = parent["part"]
    assert isinstance(fused, FusedGelu)
    return fused


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_norm_has_torchs_values(
    width: int, bias: bool, dtype: torch.dtype, kernel: Kernel
) -> None:
    module = layer_norm(width, dtype, bias=bias)
    x = draw(2, ROWS, width, dtype=dtype)

    ours = fused_norm(module, kernel)(x)

    torch.testing.assert_close(ours, module(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", BY_TANH)
def test_an_activation_has_the_models_values(
    name: str, width: int, dtype: torch.dtype, kernel: Kernel
) -> None:
    x = draw(ROWS, width, dtype=dtype)

    ours = fused_gelu(name, kernel)

    assert ours.uses_tanh == BY_TANH[name]
    torch.testing.assert_close(ours(x), ACT2FN[name](x))


@pytest.mark.parametrize("name", BY_TANH)
def test_an_activation_of_a_gate_reads_rows_of_two(name: str, kernel: Kernel) -> None:
    both = draw(ROWS, 66)
    gate, _ = both.chunk(2, dim=-1)

    ours = fused_gelu(name, kernel)(gate)

    assert torch.equal(ours, fused_gelu(name, kernel)(gate.contiguous()))
    assert ours.is_contiguous()


@pytest.mark.parametrize("name", BY_TANH)
def test_an_activation_of_the_largest_numbers_is_finite(name: str, kernel: Kernel) -> None:
    x = torch.tensor([3e38, -3e38, torch.inf, 0.0, torch.nan])

    ours = fused_gelu(name, kernel)(x)

    assert ours[:4].tolist() == [x[0].item(), 0.0, torch.inf, 0.0]
    assert ours[4].isnan()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_keeps_its_bits_beside_others(
    threads: int, dtype: torch.dtype, kernel: Kernel
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    parts: list[Any] = [
        fused_norm(layer_norm(1000, dtype), kernel),
        *(fused_gelu(name, kernel) for name in BY_TANH),
    ]
    x = draw(ROWS, 1000, dtype=dtype)
    try:
        for part in parts:
            whole = part(x)
            for row in range(0, ROWS - 3, 7):
                assert torch.equal(part(x[row : row + 3]), whole[row : row + 3])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_instruction_set_gives_the_same_bits(dtype: torch.dtype) -> None:
    norm = layer_norm(333, dtype)
    x = draw(ROWS, 333, dtype=dtype)

    norms = [fused_norm(norm, kernel)(x) for kernel in kernels()]
    gelus = [[fused_gelu(name, kernel)(x) for kernel in kernels()] for name in BY_TANH]

    for same in (norms, *gelus):
        assert all(torch.equal(one, same[0]) for one in same)


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(32, elementwise_affine=False),
        nn.LayerNorm((4, 32)),
        nn.SiLU(),
        ACT2FN["quick_gelu"],
        ACT2FN["gelu_10"],
        ACT2FN["gelu_new"],
    ],
    ids=["without-weight", "two-dimensions", "silu", "quick", "clipped", "rounds-in-between"],
)
def test_other_modules_stay(module: nn.Module, kernel: Kernel) -> None:
    parent = nn.ModuleDict({"part": module})

    assert fuse_layer_norms(parent, kernel) + fuse_gelus(parent, kernel) == 0
    assert parent["part"] is module


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - set(POOLED) - {"gemma3_text"}))
def test_every_encoder_gives_the_same(name: str) -> None:
    torch.manual_seed(4)
    model = tf.AutoModel.from_config(CONFIGS[name](), dtype=torch.float32).eval()
    fused = copy.deepcopy(model)
    ids = torch.arange(3, 43)[None]

    num_norms = fuse_layer_norms(fused, kernels()[0])
    num_gelus = fuse_gelus(fused, kernels()[0])

    torch.testing.assert_close(
        fused(ids).last_hidden_state, model(ids).last_hidden_state, rtol=1e-4, atol=1e-5
    )
    modules = list(model.modules())
    assert num_norms == sum(type(module) is nn.LayerNorm for module in modules)
    assert num_gelus == sum(type(module).__name__ == "GELUActivation" for module in modules)
