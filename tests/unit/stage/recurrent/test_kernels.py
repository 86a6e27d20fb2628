"""The recurrent kernels compute what torch does token by token, whatever is in a slot before a
sequence begins, and give each row its bits whatever runs next to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from services.stage.attention.paged_kv import MicroBatch, Span
from services.stage.kernels import kernel
from services.stage.recurrent.mixers import use_mixers
from services.stage.recurrent.recurrence import Recurrence
from services.stage.recurrent.states import RecurrentStates
from shardline.base.errors import ProtocolError
from tests.models import CONFIGS

MODELS: dict[str, Callable[[], Any]] = {
    name: CONFIGS[name]
    for name in ("lfm2", "granitemoehybrid", "qwen3-next", "olmo-hybrid", "falcon-h1")
}
LENGTHS = (29, 1, 12)
SLOTS = (2, 0, 4)
NUM_SLOTS = 5
CUTS = ((0, 13), (13, 14), (14, 29))


@pytest.fixture(params=MODELS)
def layer(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A model's first layer, of random weights."""
    torch.manual_seed(3)
    with torch.inference_mode():
        model = tf.AutoModelForCausalLM.from_config(MODELS[request.param]()).eval()
        for parameter in model.parameters():
            parameter.data.normal_(std=0.25)
        yield model.base_model.layers[0]


def bound(layer: Any, *, native: bool) -> tuple[Any, Recurrence]:
    """The layer's mixer, and what it shares; slots have something in them."""
    recurrence = use_mixers({0: layer})
    recurrence.kernel = kernel.load() if native else None
    states = RecurrentStates(recurrence.shapes, NUM_SLOTS)
    for tensor in states.of_layer[0]:
        tensor.normal_()
    recurrence.bind(states)
    (mixer,) = (each for each in layer.modules() if "forward" in vars(each))
    return mixer, recurrence


def run(mixer: Any, recurrence: Recurrence, spans: list[Span], x: Tensor) -> Tensor:
    """The outputs [T, H] of spans over their inputs, which lie one behind the other."""
    recurrence.use(MicroBatch.of(spans, min_rows=len(x)))
    out: Tensor = mixer.forward(x[None])[0]
    return out


def spans_of(lengths: tuple[int, ...]) -> list[Span]:
    return [
        Span(start=0, length=length, blocks=[index], state=slot)
        for index, (length, slot) in enumerate(zip(lengths, SLOTS, strict=False))
    ]


def test_kernels_compute_what_torch_computes(layer: Any) -> None:
    x = torch.randn(sum(LENGTHS) + 3, 32)
    mixer, recurrence = bound(layer, native=True)
    found = run(mixer, recurrence, spans_of(LENGTHS), x)
    recurrence.kernel = None
    expected = run(mixer, recurrence, spans_of(LENGTHS), x)

    num = sum(LENGTHS)
    assert torch.allclose(
        found[:num], expected[:num], rtol=1e-4, atol=1e-5 * expected.abs().max().item()
    )


def test_chunks_beside_others_have_the_bits_of_a_sequence_alone(layer: Any) -> None:
    x = torch.randn(sum(LENGTHS), 32)
    mixer, recurrence = bound(layer, native=True)
    alone = run(mixer, recurrence, spans_of(LENGTHS[:1]), x[: LENGTHS[0]])

    parts = []
    for start, stop in CUTS:
        beside = Span(start=0, length=7, blocks=[3], state=1)
        own = Span(start=start, length=stop - start, blocks=[0], state=3)
        rows = torch.cat([x[-7:], x[start:stop]])
        parts.append(run(mixer, recurrence, [beside, own], rows)[7:])

    assert torch.equal(torch.cat(parts), alone)


def test_two_sequences_in_one_slot_are_refused(layer: Any) -> None:
    mixer, recurrence = bound(layer, native=True)
    twice = [Span(start=0, length=1, blocks=[index], state=1) for index in range(2)]

    with pytest.raises(ProtocolError, match="slots of states"):
        run(mixer, recurrence, twice, torch.randn(2, 32))
