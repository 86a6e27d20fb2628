"""What the load asks for: a fixed set of distinct requests, so that each job's tokens are known. Knows no door."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

NUM_REQUESTS = 48
MODEL = "clerk"
LENGTHS = (24, 64, 24, 160, 24, 420)
"""Output tokens, in rotation: short ones end between two faults, long ones are caught in the act."""
MAX_CRASHES = 100
"""Heads are killed so often here that three in a row meet the same innocent job. Poison has the default."""


def columns(request: Mapping[str, Any]) -> tuple[str, str, str, int]:
    """The same for plain SQL: model, prompt, params, max_crashes."""
    params = dict(request)
    model, prompt, max_crashes = (params.pop(name) for name in ("model", "prompt", "max_crashes"))
    return model, prompt, json.dumps(params), max_crashes


def request(number: int) -> Mapping[str, Any]:
    """One of the set: half of them greedy, half sampled under seeds of their own."""
    return {
        "model": MODEL,
        "prompt": f"sort: {number}, 7, 30, 12 =",
        "max_tokens": LENGTHS[number % len(LENGTHS)],
        "ignore_eos": True,
        "temperature": 0.8 if (number // len(LENGTHS)) % 2 else 0.0,
        "seed": number,
        "max_crashes": MAX_CRASHES,
    }
