"""Weights with numbers that lie in a checkpoint's file as the kernels compute with them. Knows no
format of files.

The loader's parameters stand for them: of the right shape, without values. Packing reads the
numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from services.stage.products.groups import Groups

_ATTRIBUTE = "shardline_stored"


class StoredWeight(Protocol):
    """Some rows of a weight [N, K] in a file; of stacked experts one's behind another's."""

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the parameter in the model: N and K, or of stacked experts all three."""

    @property
    def order(self) -> Tensor | None:
        """Which input stands at each place of `groups`, int32 [K]; None: each at its own."""

    @property
    def num_bytes(self) -> int:
        """What its groups take."""

    def groups(self) -> Groups:
        """Reads the numbers of the rows, [N, K]."""

    def rows(self, share: range) -> StoredWeight:
        """Returns these of the rows."""


def keep(weight: Tensor, stored: StoredWeight) -> None:
    """Has a parameter, [N, K] of any float dtype, stand for a stored weight."""
    setattr(weight, _ATTRIBUTE, stored)


def keep_all(model: nn.Module, stored: Mapping[str, StoredWeight]) -> None:
    """Has the parameters of a model stand for stored weights, by their names."""
    for name, parameter in model.named_parameters():
        if name in stored:
            keep(parameter, stored[name])


def stored_of(weight: Tensor) -> StoredWeight | None:
    """Returns what a parameter, [...] of any dtype, stands for; None: it has values itself."""
    found: StoredWeight | None = getattr(weight, _ATTRIBUTE, None)
    return found


def fill(model: nn.Module) -> None:
    """Gives the parameters of a model that still stand for stored weights their values, [N, K] in
    the parameter's dtype: something else than a packed product computes with them."""
    for parameter in model.parameters():
        stored = stored_of(parameter)
        if stored is not None and parameter.numel():
            parameter.data = _floats(stored).to(parameter.dtype)


def _floats(stored: StoredWeight) -> Tensor:
    """What a weight means, float32 [N, K]."""
    floats = stored.groups().floats()
    order = stored.order
    return floats if order is None else floats[:, torch.argsort(order)]
