"""Peers: transformers' own `generate`, one prompt at a time or in static batches.

python -m tests.benchmarks.hf --model DIR --dtype bfloat16 --batch 32
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import torch
import transformers as tf

from tests.benchmarks.workload import NEW_TOKENS, workload


def main() -> None:
    """Prints output tokens/s of each run as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument(
        "--prompts", type=int, default=64, help="only the first so many of W (they are alike)"
    )
    parser.add_argument("--runs", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = tf.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype)
    ).eval()
    prompts = workload().prompts[: options.prompts]
    generate(model, prompts[: options.batch], 4)
    speeds = []
    for _ in range(options.runs):
        began_s = time.perf_counter()
        for start in range(0, len(prompts), options.batch):
            generate(model, prompts[start : start + options.batch], NEW_TOKENS)
        speeds.append(len(prompts) * NEW_TOKENS / (time.perf_counter() - began_s))
    print(json.dumps({"tokens_per_s": speeds}))


@torch.inference_mode()
def generate(model: Any, prompts: tuple[tuple[int, ...], ...], new_tokens: int) -> None:
    """One static batch, padded on the left, greedy, to its full length."""
    longest = max(map(len, prompts))
    ids = torch.tensor([(0,) * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([(0,) * (longest - len(prompt)) + (1,) * len(prompt) for prompt in prompts])
    model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )


if __name__ == "__main__":
    main()
