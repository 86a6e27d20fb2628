"""A short chaos run from a fixed seed: every invariant holds. `make chaos` is the long one."""

from __future__ import annotations

import pytest

from tests.chaos.driver.catalog import chosen
from tests.chaos.driver.runner import run
from tests.chaos.stack.options import Options

pytestmark = pytest.mark.short_leases

SEED = 20_261_121
NUM_FAULTS = 10
TIME_SCALE = 0.5
"""Another stack may run beside it: see tests/conftest.py."""
KINDS = (
    "kill head",
    "kill tail",
    "kill relay",
    "kill gateway",
    "pause tail 1.5 leases",
    "terminate head",
    "redis: kill and come back empty",
    "postgres: immediate stop",
    "client: cancel against finish",
    "messages: duplicate and reordered",
)


def test_every_invariant_holds_after_faults_under_load() -> None:
    report = run(
        Options(seed=SEED, minutes=5, time_scale=TIME_SCALE),
        chosen(",".join(KINDS)),
        print,
        max_faults=NUM_FAULTS,
    )

    assert report.findings == []
    assert (report.lost, report.duplicated, report.token_mismatches, report.stale_commits) == (
        0,
        0,
        0,
        0,
    )
    assert (report.kv_blocks_leaked, report.orphans, report.retracted, report.stuck) == (0, 0, 0, 0)
    assert report.num_faults == NUM_FAULTS
    assert report.num_kills > 0
    assert report.not_run == {}
    assert report.useful_tokens_per_s > 0
    assert report.streams_read > 0
