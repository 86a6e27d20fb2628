"""The exactness fingerprint of a pipeline: equal if and only if its layers have the same bits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise, product
from uuid import UUID

import pytest
import torch

from services.stage.attention.paged_kv import Span
from services.stage.device.acquire import acquire
from services.stage.engine.executor import Executor
from services.stage.engine.memory import Limits
from services.stage.hop.wiring import Member, Wiring
from tests.links import make_card
from tests.models import save_model
from tests.pinned import unpinned_afterwards

NUM_LAYERS = 3
KINDS = ("bfloat16", "int8")
Stage = tuple[int, str]
"""One past its last layer, and its exactness."""


def wiring(*stages: Stage, rounded: Sequence[int] = ()) -> Wiring:
    """A pipeline of these stages; those in `rounded` send int8."""
    starts = [0, *(stop for stop, _ in stages)]
    members = [
        Member(card=make_card(start, stop, exactness=exactness), sends_int8=stop in rounded)
        for start, (stop, exactness) in zip(starts, stages, strict=False)
    ]
    return Wiring(
        pipeline=UUID(int=0),
        epoch=1,
        stage_index=0,
        num_stages=len(stages),
        num_lanes=1,
        num_blocks=1,
        receiver=None,
        sender=None,
        members=tuple(members),
    )


def test_stages_alike_have_their_own_fingerprint_wherever_they_are_cut() -> None:
    assert {wiring((30, "a")).exactness, wiring((4, "a"), (9, "a"), (30, "a")).exactness} == {"a"}


def test_a_cut_between_neighbors_alike_changes_nothing() -> None:
    assert (
        wiring((15, "a"), (30, "b")).exactness
        == wiring((4, "a"), (15, "a"), (20, "b"), (30, "b")).exactness
    )


def test_which_layers_have_which_bits_decides() -> None:
    arrangements = [
        wiring((15, "a"), (30, "b")),
        wiring((15, "b"), (30, "a")),
        wiring((5, "a"), (30, "b")),
        wiring((5, "a"), (15, "b"), (30, "a")),
        wiring((5, "b"), (15, "a"), (30, "b")),
        wiring((30, "a")),
        wiring((30, "b")),
        wiring((15, "a"), (30, "a"), rounded=[15]),
        wiring((5, "a"), (30, "a"), rounded=[5]),
        wiring((15, "a"), (30, "b"), rounded=[15]),
    ]
    assert len({each.exactness for each in arrangements}) == len(arrangements)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int, str], Executor]:
    """Every range of layers of a model, in each dtype."""
    folder = tmp_path_factory.mktemp("model")
    model = save_model(folder, num_hidden_layers=NUM_LAYERS)
    limits = Limits(kv_bytes=1 << 20, token_budget=64, max_open=4)
    with unpinned_afterwards():
        device = acquire("cpu", worker="tests", lock_folder=folder / "locks")
        found = {
            (start, stop, dtype): Executor.load(
                model=model,
                layers=range(start, stop),
                device=device,
                dtype=dtype,
                limits=limits,
                cache_folder=folder,
            )
            for start, stop, dtype in product(range(NUM_LAYERS), range(1, NUM_LAYERS + 1), KINDS)
            if start < stop
        }
        device.release()
    return found


def test_pipelines_of_unlike_stages_with_equal_fingerprints_have_equal_bits(
    stages: dict[tuple[int, int, str], Executor],
) -> None:
    bits_of = defaultdict[str, set[bytes]](set)
    for cuts in ([0, 3], [0, 1, 3], [0, 2, 3], [0, 1, 2, 3]):
        for dtypes in product(KINDS, repeat=len(cuts) - 1):
            chain = [
                stages[start, stop, dtype]
                for (start, stop), dtype in zip(pairwise(cuts), dtypes, strict=True)
            ]
            formed = wiring(
                *((stop, each.fingerprint) for stop, each in zip(cuts[1:], chain, strict=True))
            )
            bits_of[formed.exactness].add(logits(chain))

    assert all(len(bits) == 1 for bits in bits_of.values())
    assert len(set.union(*bits_of.values())) == len(bits_of) == len(KINDS) ** NUM_LAYERS


@torch.inference_mode()
def logits(chain: Sequence[Executor]) -> bytes:
    """Of a short prompt's last token."""
    x = torch.arange(3, 23)
    for stage in chain:
        x = stage.forward.sampled_outputs(
            [Span(start=0, length=20, blocks=[0])], x, list(range(20))
        )
    return x[-1].view(torch.int16).numpy().tobytes()
