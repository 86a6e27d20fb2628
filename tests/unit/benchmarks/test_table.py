"""The pure parts of the table of quality and speed: scores of logits, the texts, what is written,
and the batches that llama.cpp is given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.benchmarks.peers.measure import Figures
from tests.benchmarks.peers.readings import Agreement, Score, texts
from tests.benchmarks.peers.runners.llama_batches import LlamaBatches
from tests.benchmarks.peers.runners.llama_library import BATCH, Row
from tests.benchmarks.peers.runners.wire import Work
from tests.benchmarks.peers.table import Row as TableRow
from tests.benchmarks.peers.table import markdown

VOCABULARY = 5000


def scored(logits: list[list[float]], exact: list[list[float]], ids: Sequence[int]) -> Score:
    """One window."""
    score = Score()
    score.add(torch.tensor(logits), torch.log_softmax(torch.tensor(exact), -1), ids)
    return score


def test_a_score_is_of_all_tokens_but_the_first_and_of_no_row_after_the_last() -> None:
    half = math.log(2.0)
    one = scored([[0.0, 0.0], [0.0, half], [9.0, 0.0]], [[0.0, 0.0]] * 3, (1, 0, 1))
    assert one.num_tokens == 2
    assert one.perplexity == pytest.approx(math.sqrt(2 * 1.5))
    apart = 0.5 * math.log(0.5 / (1 / 3)) + 0.5 * math.log(0.5 / (2 / 3))
    assert one.divergence == pytest.approx(apart)
    assert one.num_same == 1


def test_float32_agrees_with_itself_and_every_token_counts_once() -> None:
    logits = [[0.0, 3.0, 1.0]] * 4
    same = scored(logits, logits, (0, 1, 2, 1))
    other = scored([[3.0, 0.0, 1.0]] * 2, logits[:2], (0, 1))
    assert same.divergence == pytest.approx(0.0, abs=1e-6)
    found = Agreement.of([same, other])
    assert found.same == 0.75
    assert found.divergence == pytest.approx(other.divergence / 4)


def test_each_text_has_20_kb() -> None:
    found = texts()
    assert list(found) == ["prose", "license", "code"]
    assert min(len(text.encode()) for text in found.values()) >= 20_000


def test_the_table_leaves_out_what_was_not_found_and_says_why() -> None:
    figures = Figures(
        tokens_per_s=310.4, ttft_p50_ms=99.6, ttft_p99_ms=1.0, itl_p50_ms=8.25, itl_p99_ms=9.0
    )
    score = Score(num_tokens=10, loss=10 * math.log(2.0), divergence=0.1, num_same=9)
    whole = TableRow(dtype="int4", engine="a", scores={"code": score}, weight_bytes=3 << 20)
    whole.runs = {"W": [figures], "alone": [figures]}
    missing = TableRow(dtype="int4", engine="b", skipped="no wheel")
    page = markdown([whole, missing], ["code"])
    assert "| int4, a | 2.000 | 0.900 | 0.0100 | 3 | 310 | 100 | 8.2 |" in page
    assert "| int4, b |  |  |  |  |  |  |  |" in page
    assert page.endswith("- b int4: no wheel")


class Successor:
    """A model whose next token is the last one and 1; it holds the place of each sequence."""

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}
        self.num_rows: list[int] = []

    def decode(self, rows: Sequence[Row]) -> Any:
        """See `Decoder`."""
        self.num_rows.append(len(rows))
        for _, place, sequence, _ in rows:
            assert place == self.lengths.get(sequence, 0)
            self.lengths[sequence] = place + 1
        return np.eye(VOCABULARY)[[token + 1 for token, *_, wanted in rows if wanted]]

    def forget(self, sequence: int) -> None:
        """See `Decoder`."""
        del self.lengths[sequence]


def test_llama_cpp_writes_first_and_takes_prompts_as_a_batch_has_room() -> None:
    model = Successor()
    prompts = [list(range(first, first + 1500)) for first in (0, 1000, 2000)]
    work = Work({"prompts": prompts, "new_tokens": 3, "arrivals_s": [0.0] * 3})
    record = LlamaBatches(model, 2).run(work)
    assert record.ids == [[prompt[-1] + step for step in (1, 2, 3)] for prompt in prompts]
    assert model.lengths == {}
    assert model.num_rows == [BATCH, 3000 - BATCH + 1, 2, 1500 + 1, 1, 1]
