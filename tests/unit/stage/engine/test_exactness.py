"""The start-up probe and the fingerprint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from services.stage.attention.paged_kv import Span
from services.stage.engine.exactness import Probe, exactness_fingerprint

SIZE = 4


def inputs(num_rows: int, generator: torch.Generator) -> Tensor:
    """Random rows."""
    return torch.randn(num_rows, SIZE, generator=generator)


def by_row(_spans: Sequence[Span], x: Tensor, rows: list[int]) -> Tensor:
    """Each row by itself."""
    return x[rows] * 3


def test_rows_that_depend_on_themselves_are_exact() -> None:
    assert Probe(by_row, inputs, num_blocks=8).passes()


@pytest.mark.parametrize(
    "disturb",
    [
        pytest.param(lambda spans, _: spans[0].length == 1, id="alone is not as in a prefill"),
        pytest.param(lambda spans, _: len(spans) > 3, id="many beside"),
        pytest.param(
            lambda spans, _: spans[-1].length > 1 and len(spans) > 1, id="a prefill beside"
        ),
        pytest.param(lambda spans, _: spans[0].start == 37, id="one chunk"),
    ],
)
def test_one_bit_that_depends_on_the_batch_is_not_exact(disturb: Any) -> None:
    def forward(spans: Sequence[Span], x: Tensor, rows: list[int]) -> Tensor:
        outputs = by_row(spans, x, rows)
        if disturb(spans, x):
            outputs[0, 0] = torch.nextafter(outputs[0, 0], torch.tensor(9.0))
        return outputs

    assert not Probe(forward, inputs, num_blocks=8).passes()


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 200])
def test_the_probe_keeps_its_blocks_inside_the_pool_and_apart(num_blocks: int) -> None:
    used: set[int] = set()

    def forward(spans: Sequence[Span], x: Tensor, rows: list[int]) -> Tensor:
        blocks = [block for span in spans for block in span.blocks]
        assert len(blocks) == len(set(blocks))
        assert len(x) == sum(span.length for span in spans)
        used.update(blocks)
        return by_row(spans, x, rows)

    assert Probe(forward, inputs, num_blocks=num_blocks).passes()
    assert used <= set(range(num_blocks))


FACTS: dict[str, Any] = {
    "weights": "a" * 64,
    "dtype": torch.float32,
    "kernel": "kernel-avx512",
    "packing": "onednn",
    "num_threads": 1,
    "device": ["a processor"],
}


def test_the_same_facts_have_the_same_fingerprint() -> None:
    assert exactness_fingerprint(**FACTS) == exactness_fingerprint(**FACTS)
    assert len(exactness_fingerprint(**FACTS)) == 64


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weights", "b" * 64),
        ("dtype", torch.bfloat16),
        ("kernel", "sdpa"),
        ("packing", "tiles"),
        ("num_threads", 2),
        ("device", ["another"]),
    ],
)
def test_another_fact_has_another_fingerprint(name: str, value: Any) -> None:
    assert exactness_fingerprint(**{**FACTS, name: value}) != exactness_fingerprint(**FACTS)
