"""One cell of the matrix of exact rows: the same jobs in crowds of several sizes and over several
stages, bit by bit.

python -m tests.conformance.cell --model clerk|wide --dtype bfloat16 --cores 0-1 [--prompts 300]
[--stages 1 2 3]

A process of its own for each, since oneDNN reads ONEDNN_MAX_CPU_ISA once. Prints one JSON line for
each number of stages: whether the pipeline says that it is exact, and how many jobs had other
tokens or log-probabilities.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from services.stage.device.acquire import acquire
from services.stage.engine.executor import Executor
from shardline.contract.job import SamplingParams
from shardline_scheduler.sequence import Request
from tests.chain import MAX_BUDGET, Guesses, complete, load_chain
from tests.repository import REPOSITORY

CLERK = REPOSITORY / "services" / "standalone" / "demo" / "clerk" / "model"
FEW = 3
CROWDS = (64, 32, FEW, 1)
"""Jobs at a time. The last run in one stage, each job alone, is what all others are compared
with."""
LENGTHS = (4, 300)
"""The shortest and the longest prompt. As many lie below their geometric mean as above it."""
NUM_COMMON = 150
ROUND = 3
NUM_NEW = 4
NUM_REPEATED = 24
"""Of a prompt that repeats itself: the model begins to do so too, and guesses come true."""
KV_BYTES = 256 * 2**20
WIDE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
}
"""A random Llama: wide rows, few layers."""

Outcome = tuple[tuple[int, ...], Any]
"""Ids and log-probabilities."""


def main() -> None:
    """Loads and compares; one JSON line for each number of stages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("clerk", "wide"), required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "int8", "int4"), required=True)
    parser.add_argument("--cores", required=True, help="a thread for each")
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardline-cell-") as name:
        for verdict in verdicts(options, Path(name)):
            print(json.dumps(verdict), flush=True)


def verdicts(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """For each number of stages."""
    device = acquire(f"cpu:{options.cores}", worker="cell", lock_folder=folder, shared=True)
    model = CLERK if options.model == "clerk" else save_wide(folder)
    jobs = requests(options.prompts, vocab_size=tf.AutoConfig.from_pretrained(model).vocab_size)
    expected: list[Outcome] | None = None
    for num_stages in options.stages:
        stages = load_chain(
            model,
            num_stages,
            device,
            folder,
            dtype=options.dtype,
            kv_bytes=KV_BYTES,
            max_open=2 * CROWDS[0],
        )
        # A larger crowd than the first one that has all jobs at once would be the same run.
        largest = min((crowd for crowd in CROWDS if crowd >= len(jobs)), default=max(CROWDS))
        runs = {crowd: outcomes(stages, jobs, crowd) for crowd in CROWDS if crowd <= largest}
        expected = expected or runs[1]
        yield {
            "stages": num_stages,
            "jobs": len(jobs),
            "exact": all(stage.exact for stage in stages),
            "changed": {
                crowd: sum(a != b for a, b in zip(run, expected, strict=True))
                for crowd, run in runs.items()
            },
        }


def outcomes(stages: Sequence[Executor], jobs: Sequence[Request], crowd: int) -> list[Outcome]:
    """Of all jobs, so many at a time; alone, each computes its whole prompt, and nothing is
    guessed."""
    guesses = Guesses() if crowd > 1 else None
    ends = complete(
        stages, jobs, budget=MAX_BUDGET, seats=crowd, prefix_cache=crowd > 1, guesses=guesses
    )
    assert any(end.num_cached for end in ends) or crowd != FEW, "jobs that come later find KV"
    assert crowd != FEW or (guesses is not None and guesses.num_made > guesses.num_true > 0), (
        "some guesses come true"
    )
    return [(end.output_ids, end.logprobs) for end in ends]


def requests(num: int, *, vocab_size: int) -> list[Request]:
    """Prompts of all lengths in any order, half of them greedy, all with log-probabilities. Every
    other one has its first tokens in common with the others, every fourth says a few tokens over
    and over and is greedy."""
    generator = torch.Generator().manual_seed(6)
    shortest, longest = LENGTHS
    shares = (torch.randperm(num, generator=generator) / max(1, num - 1)).tolist()
    sizes = [round(shortest * (longest / shortest) ** share) for share in shares]
    prompts = [
        torch.randint(3, vocab_size, (size,), generator=generator).tolist() for size in sizes
    ]
    common = torch.randint(3, vocab_size, (NUM_COMMON,), generator=generator).tolist()
    for prompt in prompts[::2]:
        prompt[:NUM_COMMON] = common[: len(prompt)]
    for prompt in prompts[1::4]:
        prompt[:] = (prompt[:ROUND] * len(prompt))[: len(prompt)]
    return [
        Request(
            key=(str(index), 1),
            prompt_ids=tuple(prompt),
            params=SamplingParams(
                max_tokens=NUM_REPEATED if index % 4 == 1 else NUM_NEW,
                temperature=0.8 * (index % 4 in {0, 3}),
                logprobs=2,
            ),
            seed=index,
        )
        for index, prompt in enumerate(prompts)
    ]


def save_wide(folder: Path) -> Path:
    """The random Llama, the same every time."""
    torch.manual_seed(3)
    tf.LlamaForCausalLM(tf.LlamaConfig(**WIDE)).save_pretrained(folder / "wide")
    return folder / "wide"


if __name__ == "__main__":
    main()
