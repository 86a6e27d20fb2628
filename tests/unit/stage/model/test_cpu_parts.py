"""Which parts of a model stay on the CPU, and what the accelerator is spared by it."""

from __future__ import annotations

import pytest
import transformers as tf

from services.stage.model.cpu_parts import CpuPart, num_bytes, parse_parts, parts_of
from shardline.base.errors import Invalid
from tests.models import CONFIGS

BOTH = frozenset(CpuPart)


@pytest.mark.parametrize(
    ("text", "parts"),
    [("", set()), ("output", {CpuPart.OUTPUT}), (" embedding , output,", BOTH)],
)
def test_parts_are_named_with_commas(text: str, parts: set[CpuPart]) -> None:
    assert parse_parts(text) == parts


def test_another_part_is_refused_with_those_that_can_stay() -> None:
    with pytest.raises(Invalid, match=r"SHARDLINE_CPU_PARTS: 'norm' .*embedding or output"):
        parse_parts("embedding,norm")


def test_a_stage_behind_the_first_keeps_only_what_its_output_layer_needs() -> None:
    assert parts_of(frozenset({CpuPart.EMBEDDING}), is_first=False) == frozenset()
    assert parts_of(frozenset({CpuPart.OUTPUT}), is_first=False) == BOTH
    assert parts_of(frozenset({CpuPart.OUTPUT}), is_first=True) == {CpuPart.OUTPUT}


@pytest.mark.parametrize(
    ("name", "parts", "weights"),
    [
        ("llama", {CpuPart.EMBEDDING}, 1),
        ("llama", BOTH, 2),
        ("llama-tied", {CpuPart.EMBEDDING}, 0),
        ("llama-tied", BOTH, 1),
    ],
)
def test_a_tied_weight_leaves_the_accelerator_only_with_both_its_parts(
    name: str, parts: set[CpuPart], weights: int
) -> None:
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[name]())
    weight = model.get_input_embeddings().weight
    assert num_bytes(model, parts) == weights * weight.numel() * weight.element_size()
