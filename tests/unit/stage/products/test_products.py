"""Products that are not our own: found in any model, and run with the numbers of rows that they are
told."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from services.stage.products.products import products


@torch.inference_mode()
def test_plain_layers_and_routers_see_only_the_rows_that_they_are_told() -> None:
    # Given a plain layer, one stored the other way round, and a router, each of which would note
    # the rows that it sees
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
