"""The least time that this machine's limits leave to a workload, from the sizes of the model.
Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tests.benchmarks.model import CONFIG
from tests.benchmarks.peers.limits import shapes
from tests.benchmarks.peers.workloads import Work

BYTES = {"bf16": 2, "fp32": 4, "int8": 1}


def products_s(
    work: Work, products: Iterable[Mapping[str, Any]], precision: str, threads: int
) -> float:
    """Seconds of the workload's products, each at the best rate that its shape reached with any
    number of rows. KV that requests share counts once for each of them: a prefix cache may beat
    it."""
    best: dict[str, float] = {}
    for one in products:
        if (one["precision"], one["threads"]) == (precision, threads):
            best[one["shape"]] = max(best.get(one["shape"], 0.0), 1e9 * one["gflop_per_s"])
    rows = work.num_prompt_tokens + work.num_output_tokens - len(work.prompts)
    seconds = 0.0
    for name, (depth, width) in shapes().items():
        times = work.num_output_tokens if name == "logits" else rows * CONFIG["num_hidden_layers"]
        seconds += 2.0 * times * depth * width / best[name]
    return seconds


def weights_ms(precision: str, gb_per_s: float) -> float:
    """Milliseconds of reading all weights once: what one request waits between two tokens at
    least."""
    layer = sum(depth * width for name, (depth, width) in shapes().items() if name != "logits")
    logits = CONFIG["hidden_size"] * CONFIG["vocab_size"]
    return BYTES[precision] * (CONFIG["num_hidden_layers"] * layer + logits) / gb_per_s / 1e6
