"""Choices of one prompt that are taken in together: one prefill for all, and the bits of each
alone."""

from __future__ import annotations

from pathlib import Path

from services.stage.device.device import Device
from shardline.contract.job import SamplingParams
from shardline_scheduler.kv_blocks import BLOCK_TOKENS
from tests.chain import complete, load_chain, requests
from tests.tiny_head import CLERK

NUM_CHOICES = 8
PROMPT = [(7 * place + 3) % 128 for place in range(3 * BLOCK_TOKENS + 8)]


def test_one_prefill_serves_all_and_changes_no_bit(device: Device, tmp_path: Path) -> None:
    stages = load_chain(CLERK, 2, device, tmp_path)
    params = SamplingParams(max_tokens=6, temperature=1.0, logprobs=2)
    wanted = requests([PROMPT] * NUM_CHOICES, params)
    alone = [complete(stages, [one], budget=512, seats=1, prefix_cache=False)[0] for one in wanted]

    together = complete(stages, wanted, budget=64, seats=NUM_CHOICES)

    assert [(end.output_ids, end.logprobs) for end in together] == [
        (end.output_ids, end.logprobs) for end in alone
    ]
    assert [end.num_cached for end in together] == [0, *[3 * BLOCK_TOKENS] * (NUM_CHOICES - 1)]
