"""Weights in memory of our own."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from services.stage.device.owned_weights import give_back, own


def mapped_linear(path: Path) -> nn.Linear:
    """A linear whose weight lies in a file."""
    path.write_bytes(bytes(4 * 64 * 64))
    linear = nn.Linear(64, 64, bias=False)
    linear.weight.data = torch.from_file(str(path), shared=True, size=64 * 64).view(64, 64)
    return linear


def test_owned_weights_do_not_change_with_their_file(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    linear = mapped_linear(path)
    other = mapped_linear(path)

    own(linear)
    other.weight.data.fill_(1.0)

    assert torch.equal(linear.weight, torch.zeros(64, 64))


def test_tied_weights_stay_tied_when_owned(tmp_path: Path) -> None:
    first = mapped_linear(tmp_path / "weights")
    second = nn.Linear(64, 64, bias=False)
    second.weight.data = first.weight.data

    own(nn.Sequential(first, second))

    assert first.weight.data_ptr() == second.weight.data_ptr()


def test_memory_that_is_no_file_keeps_its_values() -> None:
    tensor = torch.arange(10_000.0)

    give_back(tensor)

    assert torch.equal(tensor, torch.arange(10_000.0))
