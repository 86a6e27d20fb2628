"""Structured output beside free text, on the engine of one stage: what masks cost a
batch, and what forced tokens are worth to one request.

    python -m tests.benchmarks.structured [--batch 32] [--tokens 96]

Rows held to a schema and free rows have the same number of tokens and alternate.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from services.stage.device.acquire import acquire
from services.stage.device.device import Device
from services.stage.engine.executor import Executor
from services.stage.engine.memory import Limits
from shardline.contract.job import FinishReason, SamplingParams
from shardline.contract.structured_output import StructuredOutput
from shardline_scheduler.events import SequenceFailed
from shardline_scheduler.scheduler import Scheduler
from shardline_scheduler.scheduler_config import SchedulerConfig
from shardline_scheduler.sequence import Request
from shardline_scheduler.step_plan import StepResult, decode_plan, encode
from tests.real_model import real_model

NAMES = ("order_number", "customer_name", "delivery_address", "total_amount", "is_paid")
RECORD = {
    "type": "object",
    "properties": {
        NAMES[0]: {"type": "integer", "minimum": 0, "maximum": 99999},
        NAMES[1]: {"type": "string", "maxLength": 12},
        NAMES[2]: {"type": "string", "maxLength": 16},
        NAMES[3]: {"type": "number", "minimum": 0, "maximum": 999},
        NAMES[4]: {"type": "boolean"},
    },
    "required": list(NAMES),
    "additionalProperties": False,
}
RECORDS = {"type": "array", "items": RECORD, "minItems": 40}
"""Longer than a run, so that no row ends before the others."""
PROSE = {"type": "string", "minLength": 2000}
"""Nothing of it is forced: only its masks are left to cost something."""
LOOKUP_ROWS = 16
MAX_LEN = 1024
NUM_LAYERS = 30


class Sink:
    """Makes no text and ends after a number of tokens."""

    text = ""

    def __init__(self, num_tokens: int) -> None:
        self._left = num_tokens

    def push(self, _token: int, /) -> tuple[str, FinishReason | None]:
        """One token more."""
        self._left -= 1
        return "", FinishReason.LENGTH if self._left == 0 else None

    def flush(self) -> str:
        """Nothing is held back."""
        return ""


class Bench:
    """The real model under the real scheduler, in one stage."""

    def __init__(self, device: Device, folder: Path, batch: int) -> None:
        self._executor = Executor.load(
            model=real_model(),
            layers=range(NUM_LAYERS),
            device=device,
            dtype="bfloat16",
            limits=Limits(kv_bytes=None, token_budget=512, max_open=2 * batch),
            cache_folder=folder,
        )

    def tokens_per_s(self, schema: dict[str, Any] | None, *, batch: int, tokens: int) -> float:
        """Returns the speed of a batch of which each row gets as many tokens, at temperature 1."""
        self._executor.reset()
        scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=self._executor.num_blocks,
                max_seats=batch,
                token_budget=512,
                num_lanes=1,
                max_len=MAX_LEN,
                prompt_lookup=LOOKUP_ROWS,
            )
        )
        output = None if schema is None else StructuredOutput(json=schema)
        params = SamplingParams(
            max_tokens=tokens,
            temperature=1.0,
            structured_outputs=output,
            ignore_eos=schema is None,
        )
        for number in range(batch):
            prompt = tuple(100 + (number * 7919 + place * 1047) % 40000 for place in range(24))
            key = (str(number), 0)
            request = Request(key=key, prompt_ids=prompt, params=params, seed=number)
            scheduler.add(request, Sink(tokens))
        began_s = time.perf_counter()
        while (plan := scheduler.schedule()) is not None:
            result = self._executor.run(decode_plan(encode(plan)), None)
            assert isinstance(result, StepResult)
            failed = [each for each in scheduler.apply(result) if isinstance(each, SequenceFailed)]
            assert not failed, failed
        return batch * tokens / (time.perf_counter() - began_s)


def main() -> None:
    """Prints tokens/s of runs that alternate as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    rows: dict[str, tuple[dict[str, Any] | None, int]] = {
        "json_alone": (RECORDS, 1),
        "free_alone": (None, 1),
        "prose_batch": (PROSE, options.batch),
        "json_batch": (RECORDS, options.batch),
        "free_batch": (None, options.batch),
    }
    speeds: dict[str, list[float]] = {name: [] for name in rows}
    with tempfile.TemporaryDirectory() as folder:
        device = acquire("cpu:0-1", worker="structured", lock_folder=Path(folder))
        bench = Bench(device, Path(folder), options.batch)
        for run in range(options.runs + 1):
            for name, (schema, batch) in rows.items():
                speed = bench.tokens_per_s(schema, batch=batch, tokens=options.tokens)
                if run:  # The first one warms up.
                    speeds[name].append(round(speed, 2))
    print(json.dumps(speeds))


if __name__ == "__main__":
    main()
