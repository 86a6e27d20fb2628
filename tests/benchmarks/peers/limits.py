"""What this machine can do at most: products per shape and rows, and reading of memory, on one core
and on all.

Prints one JSON line. Runs in a process of its own, for it changes torch's threads.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from tests.benchmarks.model import CONFIG

ROWS = (1, 8, 32, 64, 256, 512)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
STREAM_SIDE = 1 << 14
"""Of a square of fp32: 1 GiB, far more than the last cache has."""
SAMPLE_S = 0.05
STREAM_REPEATS = 5


def main() -> None:
    """Prints GFLOP/s of products and GB/s of reading."""
    cores = len(os.sched_getaffinity(0))
    print(
        json.dumps(
            {
                "products": products(cores),
                "stream_gb_per_s": {n: stream(n) for n in sorted({1, cores})},
            }
        )
    )


def shapes() -> dict[str, tuple[int, int]]:
    """[K, N] of the model's products; those that are computed in one call are one."""
    hidden = CONFIG["hidden_size"]
    inner = CONFIG["intermediate_size"]
    kv = hidden * CONFIG["num_key_value_heads"] // CONFIG["num_attention_heads"]
    return {
        "qkv": (hidden, hidden + 2 * kv),
        "o": (hidden, hidden),
        "gate-up": (hidden, 2 * inner),
        "down": (inner, hidden),
        "logits": (hidden, CONFIG["vocab_size"]),
    }


def products(cores: int) -> list[dict[str, Any]]:
    """GFLOP/s of torch's linear (oneDNN for bf16), by precision, threads, shape and rows; of the
    precisions that it packs weights of on this processor."""
    return [
        {
            "precision": precision,
            "threads": threads,
            "shape": name,
            "rows": rows,
            "gflop_per_s": round(product(dtype, threads, size, rows)),
        }
        for precision, dtype in DTYPES.items()
        if precision != "bf16" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        for threads in sorted({1, cores})
        for name, size in shapes().items()
        for rows in ROWS
    ]


@torch.inference_mode()
def product(dtype: torch.dtype, threads: int, size: tuple[int, int], rows: int) -> float:
    """GFLOP/s of x[rows, K] by W[N, K], both of `dtype`: the fastest call of SAMPLE_S. W is in
    oneDNN's layout."""
    torch.set_num_threads(threads)
    depth, width = size
    x = torch.randn(rows, depth).to(dtype)
    weight = torch.randn(width, depth).to(dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    best_s = fastest_s(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""))
    return 2 * rows * depth * width / best_s / 1e9


def stream(threads: int) -> float:
    """GB/s of reading memory that no cache holds: a matrix by a vector, the fastest of what torch
    reads with."""
    torch.set_num_threads(threads)
    matrix = torch.ones(STREAM_SIDE, STREAM_SIDE)
    x = torch.ones(STREAM_SIDE)
    best_s = min(_time_s(lambda: torch.mv(matrix, x)) for _ in range(STREAM_REPEATS))
    return round(4 * STREAM_SIDE**2 / best_s / 1e9, 1)


def fastest_s(call: Callable[[], Any]) -> float:
    """Seconds of the fastest call within SAMPLE_S, after one that does not count."""
    call()
    best_s = math.inf
    end_s = time.perf_counter() + SAMPLE_S
    while time.perf_counter() < end_s:
        best_s = min(best_s, _time_s(call))
    return best_s


def _time_s(call: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
