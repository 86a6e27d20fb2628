"""What a dtype costs in quality on texts: perplexity, divergence and the likeliest token, beside
float32.

    python -m tests.benchmarks.perplexity [--model DIR] [--text FILE ...] [--dtype int8 int4]

The model is SmolLM2-135M-Instruct (`make real-model`), the texts are the license, prose of the
documents, and a module of Python's library, 24 kB of each. One stage reads windows of 256 tokens.
"""

from __future__ import annotations

import argparse
import tempfile
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from services.stage.attention.paged_kv import Span
from services.stage.device.acquire import acquire
from services.stage.device.device import Device
from services.stage.engine.executor import Executor
from services.stage.engine.memory import Limits
from services.stage.model.model_info import ModelInfo
from services.stage.products.tiled_linear import TiledLinear
from shardline_scheduler.kv_blocks import blocks_for
from tests.real_model import FOLDER
from tests.repository import REPOSITORY

WINDOW = 256
MAX_CHARS = 24_000
TEXTS = (REPOSITORY / "LICENSE", REPOSITORY / "docs/guarantees.md", Path(tokenize.__file__))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a model foretells of a text."""

    logprobs: Tensor
    """float32 [windows, WINDOW - 1, vocabulary]."""
    loss: float
    """The mean over all tokens, in nats."""


@torch.inference_mode()
def read(stage: Executor, windows: Tensor) -> Reading:
    """Reads windows [W, WINDOW] of token ids, each by itself."""
    spans = [Span(start=0, length=WINDOW, blocks=list(range(blocks_for(WINDOW))))]
    rows = list(range(WINDOW - 1))
    logprobs = torch.stack(
        [
            torch.log_softmax(stage.forward.sampled_outputs(spans, ids, rows).float(), -1)
            for ids in windows
        ]
    )
    loss = -logprobs.gather(2, windows[:, 1:, None]).double().mean().item()
    return Reading(logprobs=logprobs, loss=loss)


def compared(reading: Reading, exact: Reading) -> str:
    """The cells of a row: perplexity and its change in percent, divergence, share of equal
    tokens."""
    change = 100 * (torch.tensor(reading.loss - exact.loss).exp().item() - 1)
    probabilities = exact.logprobs.exp()
    divergence = (probabilities * (exact.logprobs - reading.logprobs)).sum(-1).mean().item()
    equal = (exact.logprobs.argmax(-1) == reading.logprobs.argmax(-1)).double().mean().item()
    perplexity = torch.tensor(reading.loss).exp().item()
    return f"{perplexity:.3f} | {change:+.2f} % | {divergence:.4f} | {equal:.3f}"


def stage_of(folder: Path, dtype: str, device: Device, cache: Path) -> Executor:
    """The whole model as one stage."""
    info = ModelInfo.read(folder)
    return Executor.load(
        model=info,
        layers=range(info.num_layers),
        device=device,
        dtype=dtype,
        limits=Limits(kv_bytes=256 << 20, token_budget=WINDOW, max_open=1),
        cache_folder=cache,
    )


def num_held_bytes(stage: Executor) -> int:
    """Of weights in memory, each once."""
    model = stage.forward.shard.model
    tiles = [each.tiles for each in model.modules() if isinstance(each, TiledLinear)]
    held = {each.data_ptr(): each.nbytes for each in (*tiles, *model.parameters())}
    return sum(held.values())


def table(folder: Path, texts: Sequence[Path], dtypes: Sequence[str], device: Device) -> str:
    """The Markdown table."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = ["| text | dtype | perplexity | change | KL | same top-1 |", "|---|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as cache:
        stages = {
            dtype: stage_of(folder, dtype, device, Path(cache)) for dtype in ("float32", *dtypes)
        }
        for path in texts:
            ids = tokenizer(path.read_text(encoding="utf-8")[:MAX_CHARS])["input_ids"]
            windows = torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).view(-1, WINDOW)
            exact = read(stages["float32"], windows)
            rows.append(f"| {path.name} | float32 | {compared(exact, exact)} |")
            for dtype in dtypes:
                reading = read(stages[dtype], windows)
                rows.append(f"| {path.name} | {dtype} | {compared(reading, exact)} |")
    return "\n".join(rows)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=FOLDER)
    parser.add_argument("--text", type=Path, nargs="+", default=TEXTS)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "int8", "int4"])
    parser.add_argument("--device", default="cpu:0-1")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as locks:
        device = acquire(options.device, worker="perplexity", lock_folder=Path(locks))
        print(table(options.model, options.text, options.dtype, device))


if __name__ == "__main__":
    main()
