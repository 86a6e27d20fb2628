"""Texts/s of an encoder's bare engine beside transformers' padded batches, in turns on the same
cores.

    python -m tests.benchmarks.encoders --model DIR [--texts 1000] [--dtype float32]

The peer gets its best case: texts sorted by length, so that batches have little padding, and the
best of four batch sizes. The engine gets them as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from services.stage.device.acquire import acquire
from services.stage.engine.executor import Executor
from services.stage.engine.memory import Limits
from services.stage.model.model_info import ModelInfo
from tests.encoders import pool

BATCHES = (8, 16, 32, 64)
SEATS = 64
BUDGET = 1024
KV_BYTES = 512 << 20
LEAST_ID = 1000
"""Of ordinary words in BERT's vocabulary."""


def main() -> None:
    """Prints texts/s of each run, and the least cosine between both, as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--longest", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    info = ModelInfo.read(options.model)
    texts = drawn(options.texts, options.longest, info.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        device = acquire(
            f"cpu:0-{options.threads - 1}" if options.threads > 1 else "cpu:0",
            worker="encoders",
            lock_folder=cache,
            shared=True,
        )
        device.enter_thread()
        engine = Executor.load(
            model=info,
            layers=range(info.num_layers),
            device=device,
            dtype=options.dtype,
            limits=Limits(
                kv_bytes=KV_BYTES,
                token_budget=max(BUDGET, info.context_length),
                max_open=2 * SEATS,
            ),
            cache_folder=cache,
        )
        peer = tf.AutoModel.from_pretrained(
            options.model, dtype=getattr(torch, options.dtype)
        ).eval()
        figures: dict[str, Any] = {"engine": [], **{f"batches_of_{each}": [] for each in BATCHES}}
        pool([engine], texts[:SEATS], seats=SEATS)
        for _ in range(options.runs):
            began_s = time.perf_counter()
            ours = pool([engine], texts, seats=SEATS)
            figures["engine"].append(rate(texts, began_s))
            for size in BATCHES:
                began_s = time.perf_counter()
                theirs = padded(peer, texts, size)
                figures[f"batches_of_{size}"].append(rate(texts, began_s))
        device.release()
    cosines = [
        float(torch.nn.functional.cosine_similarity(torch.tensor(one), other, dim=0))
        for one, other in zip(ours, theirs, strict=True)
    ]
    print(json.dumps({"least_cosine": min(cosines), "threads": options.threads, **figures}))


def drawn(num: int, longest: int, vocab_size: int) -> list[list[int]]:
    """Texts of 4 to `longest` tokens, the same every time."""
    generator = random.Random(5)
    return [
        [generator.randrange(LEAST_ID, vocab_size) for _ in range(generator.randint(4, longest))]
        for _ in range(num)
    ]


def rate(texts: Sequence[Sequence[int]], began_s: float) -> float:
    """Texts/s since a moment."""
    return round(len(texts) / (time.perf_counter() - began_s), 1)


@torch.inference_mode()
def padded(model: Any, texts: Sequence[Sequence[int]], size: int) -> list[torch.Tensor]:
    """The normalized means of all texts, as sentence-transformers computes them."""
    order = sorted(range(len(texts)), key=lambda place: -len(texts[place]))
    found: dict[int, torch.Tensor] = {}
    for start in range(0, len(order), size):
        places = order[start : start + size]
        longest = len(texts[places[0]])
        padding = [longest - len(texts[place]) for place in places]
        ids = [[*texts[at], *([0] * num)] for at, num in zip(places, padding, strict=True)]
        mask = torch.tensor([[1] * (longest - num) + [0] * num for num in padding])
        states = model(input_ids=torch.tensor(ids), attention_mask=mask).last_hidden_state.float()
        sums = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        found |= zip(places, torch.nn.functional.normalize(sums, dim=1), strict=True)
    return [found[place] for place in range(len(texts))]


if __name__ == "__main__":
    main()
