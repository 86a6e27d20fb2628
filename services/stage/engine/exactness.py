"""Whether a stage gives a row the same bits whatever runs beside it: checked on the loaded shard, and named by a hash.

The three rules stand in docs/decisions; `RULES_VERSION` changes when they do. Knows no scheduler and no job.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
import transformers
from torch import Tensor

from services.stage.engine.kv_cache import BLOCK_TOKENS
from services.stage.engine.paged import Span

RULES_VERSION = 1
MAX_LENGTH = BLOCK_TOKENS + 9
"""The tested sequence crosses a block's edge."""
CHUNK = 37
MAX_BESIDE = 30
ISA_PREFIXES = ("avx", "amx", "fma", "sse4", "asimd", "sve", "bf16", "i8mm")

Forward = Callable[[Sequence[Span], Tensor, list[int]], Tensor]
"""Runs packed spans on their inputs; what the stage gives for the wanted rows: hidden states, or logits on a tail."""


class Probe:
    """Runs one sequence in several ways and compares every bit. Uses KV blocks from 0 up: nothing may be open."""

    def __init__(self, forward: Forward, inputs: Callable[[int, torch.Generator], Tensor], num_blocks: int) -> None:
        self._forward = forward
        self._length = min(MAX_LENGTH, num_blocks * BLOCK_TOKENS)
        self._blocks = list(range(-(-self._length // BLOCK_TOKENS)))
        self._beside = list(range(len(self._blocks), min(num_blocks, len(self._blocks) + MAX_BESIDE)))
        generator = torch.Generator().manual_seed(RULES_VERSION)
        self._inputs = inputs(self._length, generator)
        self._others = inputs(BLOCK_TOKENS, generator)

    def passes(self) -> bool:
        """Rules 1 and 2, on this device, with these weights."""
        whole = self._run(0, self._length)
        last = whole[-1:]
        ways: tuple[Callable[[], Tensor], ...] = (
            lambda: self._run(self._length - 1, self._length),
            self._run_for_the_last,
            self._run_beside_decodes,
            self._run_beside_prefill,
        )
        return torch.equal(whole, self._run_chunks()) and all(torch.equal(last, way()) for way in ways)

    def _run(self, start: int, end: int) -> Tensor:
        span = Span(start=start, length=end - start, blocks=self._blocks)
        return self._forward([span], self._inputs[start:end], list(range(end - start)))

    def _run_for_the_last(self) -> Tensor:
        """As a prompt's prefill runs: only its last row is wanted."""
        whole = Span(start=0, length=self._length, blocks=self._blocks)
        return self._forward([whole], self._inputs, [self._length - 1])

    def _run_chunks(self) -> Tensor:
        starts = range(0, self._length, CHUNK)
        return torch.cat([self._run(start, min(start + CHUNK, self._length)) for start in starts])

    def _run_beside_decodes(self) -> Tensor:
        """The last token, first of a batch of first tokens."""
        spans = [self._last_token(), *(Span(start=0, length=1, blocks=[block]) for block in self._beside)]
        return self._forward(spans, torch.cat([self._inputs[-1:], self._others[: len(self._beside)]]), [0])

    def _run_beside_prefill(self) -> Tensor:
        """The last token before another's prefill, which its own wanted rows join."""
        prefill = [Span(start=0, length=BLOCK_TOKENS, blocks=[block]) for block in self._beside[:2]]
        rows = torch.cat([self._inputs[-1:], *([self._others] * len(prefill))])
        return self._forward([self._last_token(), *prefill], rows, list(range(len(rows))))[:1]

    def _last_token(self) -> Span:
        return Span(start=self._length - 1, length=1, blocks=self._blocks)


def exactness_fingerprint(
    *,
    weights: str,
    dtype: torch.dtype,
    kernel: str,
    packed: bool,
    num_threads: int,
    device: torch.device,
) -> str:
    """sha256 of all that decides a row's bits on this stage. Equal fingerprints, equal tokens."""
    facts: Final = {
        "rules": RULES_VERSION,
        "weights": weights,
        "dtype": str(dtype),
        "kernel": kernel,
        "packed": packed,
        "threads": num_threads,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "libraries": torch.__config__.show(),
        "processor": _processor() if device.type == "cpu" else torch.cuda.get_device_name(device),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _processor() -> list[str]:
    """What libraries choose their kernels by."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    lines = (line.partition(":")[2] for line in text.splitlines() if line.startswith(("flags", "Features")))
    flags = sorted({flag for flag in next(lines, "").split() if flag.startswith(ISA_PREFIXES)})
    return [platform.machine(), torch.backends.cpu.get_cpu_capability(), *flags]
