"""Which lengths of rows a shard's products have."""

from __future__ import annotations

from torch import nn

from services.stage.model.shard import row_lengths


def test_a_product_of_one_output_counts_and_a_convolution_does_not() -> None:
    layer = nn.ModuleDict(
        {
            "gate": nn.Linear(48, 1, bias=False),
            "up": nn.Linear(48, 96),
            "conv": nn.Conv1d(40, 40, kernel_size=4, groups=40),
            "norm": nn.LayerNorm(48),
        }
    )
    assert row_lengths([layer]) == {1, 96, 48}


def test_experts_in_one_tensor_count_as_their_own_products() -> None:
    experts = nn.ParameterDict(
        {"gate_up": nn.Parameter(nn.Linear(2, 3).weight.new_zeros(4, 30, 8))}
    )
    assert row_lengths([experts]) == {30, 15}
