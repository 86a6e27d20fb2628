"""What a dtype costs in quality: how well one stage foretells right answers, given what stands
before each token.

    python -m tests.benchmarks.quality [--num 1000] [--dtype float32 bfloat16 int8] [--device cpu:0]
    [--int8-hops 1]

The model is clerk, the demo's, on prompts that it was not trained on. Perplexity is over the tokens
of the answers, ends included. An answer is right if each of its tokens is the likeliest: greedy
decoding would have given it. With `--int8-hops` the layers are cut evenly at so many places, and
activations pass there as int8.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import torch
from torch import Tensor
from transformers import AutoTokenizer

from services.stage.attention.paged_kv import Span
from services.stage.device.acquire import acquire
from services.stage.device.device import Device
from services.stage.engine.executor import Executor
from services.stage.engine.memory import Limits
from services.stage.engine.tensors import SCALE_BYTES, name_of, quantized, tensor_of, view_of
from services.stage.hop import Frame, Kind
from services.stage.model.model_info import ModelInfo
from services.standalone.demo.clerk.model import FOLDER
from services.standalone.demo.clerk.tasks import examples
from shardline.contract.fleet.split import even_split
from shardline_scheduler.kv_blocks import blocks_for

BUDGET = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A prompt and its right answer as ids, each with one at least."""

    prompt: list[int]
    answer: list[int]


def asked(num: int) -> list[Asked]:
    """So many unseen prompts, shared evenly among clerk's tasks."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    return [
        Asked(
            prompt=tokenizer(example.prompt)["input_ids"],
            answer=tokenizer(example.answer + tokenizer.eos_token, add_special_tokens=False)[
                "input_ids"
            ],
        )
        for example in examples(0, num, "unseen")
    ]


@torch.inference_mode()
def score(
    dtype: str, device: Device, questions: Sequence[Asked], cache: Path, num_hops: int
) -> str:
    """One row of the table."""
    info = ModelInfo.read(FOLDER)
    *before, tail = [
        Executor.load(
            model=info,
            layers=layers,
            device=device,
            dtype=dtype,
            limits=Limits(kv_bytes=64 << 20, token_budget=BUDGET, max_open=1),
            cache_folder=cache,
        )
        for layers in even_split(info.num_layers, 1 + num_hops)
    ]
    losses = []
    num_right = 0
    for question in questions:
        ids = torch.tensor(question.prompt + question.answer)
        span = Span(start=0, length=len(ids), blocks=list(range(blocks_for(len(ids)))))
        rows = list(range(len(question.prompt) - 1, len(ids) - 1))
        x = ids
        for stage in before:
            x = rounded(stage.forward.hidden([span], x))
        logits = tail.forward.sampled_outputs([span], x, rows).float()
        losses.append(
            torch.nn.functional.cross_entropy(logits, ids[len(question.prompt) :], reduction="none")
        )
        num_right += int(torch.equal(logits.argmax(-1), ids[len(question.prompt) :]))
    perplexity = torch.cat(losses).double().mean().exp()
    return f"| {dtype} | {perplexity:.6f} | {num_right} of {len(questions)} |"


def rounded(states: Tensor) -> Tensor:
    """Activations, [T, H] of a float dtype, as they come out of a hop of int8."""
    frame = Frame(
        kind=Kind.PLAN,
        pipeline=UUID(int=0),
        epoch=0,
        step=0,
        message=b"",
        tensor=view_of(quantized(states)),
        dtype=name_of(torch.int8),
        shape=(len(states), states.shape[1] + SCALE_BYTES),
    )
    return tensor_of(frame, states.dtype)


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num", type=int, default=1000, help="prompts")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--device", default="cpu:0")
    parser.add_argument(
        "--int8-hops", type=int, default=0, help="cuts behind which activations were int8"
    )
    options = parser.parse_args()
    questions = asked(options.num)
    rows = ["| dtype | perplexity of right answers | answers right |", "|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        device = acquire(options.device, worker="quality", lock_folder=Path(folder))
        rows += [
            score(dtype, device, questions, Path(folder), options.int8_hops)
            for dtype in options.dtype
        ]
    print("\n".join(rows))


if __name__ == "__main__":
    main()
