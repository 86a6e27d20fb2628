"""A short chaos run against containers from a fixed seed: every invariant holds. `make
chaos-compose` runs for long."""

from __future__ import annotations

import pytest

from tests.chaos.driver.drawing import among
from tests.chaos.stack.options import Options
from tests.compose.chaos import run
from tests.compose.container_faults import GROUPS
from tests.compose.engine import Docker

pytestmark = pytest.mark.timeout(1800)

SEED = 20_261_121
KINDS = (
    "docker kill head",
    "crash tail",
    "docker pause relay 1.5 leases",
    "docker restart gateway",
    "network disconnect redis",
    "network disconnect postgres",
)


def test_every_invariant_holds_after_faults_in_containers_under_load(docker: Docker) -> None:
    faults = among(",".join(KINDS), GROUPS)
    report = run(Options(seed=SEED, minutes=10), faults, docker, print, max_faults=len(KINDS))

    assert report.findings == []
    assert (report.lost, report.duplicated, report.token_mismatches, report.stale_commits) == (
        0,
        0,
        0,
        0,
    )
    assert (report.kv_blocks_leaked, report.orphans, report.retracted, report.stuck) == (0, 0, 0, 0)
    assert report.num_faults == len(KINDS)
    assert report.not_run == {}
    assert report.useful_tokens_per_s > 0
