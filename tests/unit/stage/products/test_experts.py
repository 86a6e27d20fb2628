"""Experts of mixtures as packed layers: what transformers' own experts say, and the same bits in
any crowd."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from services.stage.kernels import kernel
from services.stage.kernels.kernel import Weights
from services.stage.products.experts import EXPERTS, expert_products, is_experts
from services.stage.products.packing import pack, packed_bytes, packing_for
from services.stage.products.tiled_linear import TiledLinear
from tests.models import CONFIGS

KINDS = {"mixtral": MixtralExperts, "qwen3-moe": Qwen3MoeExperts, "gpt-oss": GptOssExperts}
"""The last one's weights lie the other way round, and have biases."""
PACKINGS = {
    "float32": (torch.float32, None, 1e-4),
    "bfloat16": (torch.bfloat16, None, 3e-2),
    "int8": (torch.bfloat16, Weights.INT8, 6e-2),
    "int4": (torch.bfloat16, Weights.INT4, 0.3),
}
"""The dtype, the integers that weights become, and how far outputs may lie apart as a share of the
largest."""
HIDDEN = 32
NUM_EXPERTS = 4
NUM_ROWS = 67


def experts(name: str, dtype: torch.dtype) -> Any:
    """The layer of experts of a small model, alone in a module."""
    config = CONFIGS[name]()
    config._experts_implementation = EXPERTS
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layer = KINDS[name](config)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.25)
    return nn.ModuleDict({"experts": layer.to(dtype)})


def routed(num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows with two experts each; the last expert gets one row only."""
    generator = torch.Generator().manual_seed(5)
    chosen = torch.rand(num_rows, NUM_EXPERTS - 1, generator=generator).topk(2).indices
    chosen[7, 1] = NUM_EXPERTS - 1
    weights = torch.rand(num_rows, 2, generator=generator)
    return torch.randn(num_rows, HIDDEN, generator=generator).to(dtype), chosen, weights.to(dtype)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_packed_experts_say_what_transformers_say_with_equal_bits_alone(
    name: str, packing: str
) -> None:
    # Given experts as transformers stacks them, and what they say
    dtype, integers, share = PACKINGS[packing]
    model = experts(name, dtype)
    rows = routed(NUM_ROWS, dtype)
    plain = copy.deepcopy(model.experts)
    plain.config._experts_implementation = "eager"
    expected = plain(*rows)

    # When they are packed
    pack(model, packing_for(dtype, kernel.load(), integers))
    together = model.experts(*rows)

    # Then they say the same, and each row alone has the bits that it has among others
    torch.testing.assert_close(together, expected, atol=share * float(expected.abs().max()), rtol=0)
    alone = torch.cat(
        [model.experts(*(part[row : row + 1] for part in rows)) for row in range(NUM_ROWS)]
    )
    assert torch.equal(alone, together)
    assert all(isinstance(layer, TiledLinear) for layer in model.experts.down_proj)
    assert expert_products(model.experts) == [], "no product is left whose number of rows matters"


@torch.inference_mode()
def test_packed_experts_free_their_weights_and_int8_ones_count_a_byte_each() -> None:
    model = experts("mixtral", torch.bfloat16)
    assert is_experts(model.experts)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    packing = packing_for(torch.bfloat16, kernel.load(), Weights.INT8)

    assert packed_bytes(model, packing) == num_weights
    pack(model, packing)

    assert list(model.parameters()) == []
