"""A token whose states are not finite: an innocent sequence that shares the blocks before it has
its own bits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.stage.attention.paged_kv import Span
from services.stage.device.device import Device
from services.stage.engine.forward import Forward
from shardline_scheduler.kv_blocks import BLOCK_TOKENS
from tests.chain import load_chain
from tests.models import save_model
from tests.pinned import first_core

ODD = 7
"""The id of the token whose embedding is not finite."""


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    """Core 0."""
    with first_core(tmp_path) as core:
        yield core


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_it_leaves_a_shared_prefix_alone(dtype: str, tmp_path: Path, device: Device) -> None:
    # Given a prompt that has such a token behind its first block, in a chunk that begins within
    # that block
    (stage,) = load_chain(save_model(tmp_path), 1, device, tmp_path, dtype=dtype)
    forward = stage.forward
    forward.shard.decoder.embed_tokens.weight[ODD] = torch.nan
    prefix = torch.arange(10, 10 + BLOCK_TOKENS)
    rest = torch.arange(20, 30)
    expected = logits(
        forward, torch.cat([prefix, rest]), blocks=[0, 1], cuts=[0, 57, BLOCK_TOKENS + len(rest)]
    )
    odd = torch.tensor([*prefix.tolist(), ODD, 12])
    assert not logits(forward, odd, blocks=[2, 3], cuts=[0, 57, len(odd)]).isfinite().all()

    # When another has its first block, then it has the bits that it has alone
    own = [Span(start=BLOCK_TOKENS, length=len(rest), blocks=[2, 4])]
    assert torch.equal(forward.sampled_outputs(own, rest, [len(rest) - 1]), expected)


def logits(forward: Forward, ids: Tensor, *, blocks: list[int], cuts: list[int]) -> Tensor:
    """Of the last token [1, V], computed in these chunks."""
    for start, stop in pairwise(cuts):
        span = Span(start=start, length=stop - start, blocks=blocks)
        out = forward.sampled_outputs([span], ids[start:stop], [stop - start - 1])
    return out
