"""A stage that comes back with less KV memory than before, while long jobs run: none of them may end of it."""

from __future__ import annotations

import random

import psutil

from services.standalone.processes import wait_until_gone
from tests.faults.fault import Fault, NotInjected, Simple
from tests.faults.kill_faults import GONE_S
from tests.faults.remains import within
from tests.faults.world import World

BACK_S = 120.0


def half(world: World, rng: random.Random) -> None:
    """Any stage of the first pipeline is killed and finds half of its memory; the next start has all of it again."""
    name, pid = world.pick(rng, f"stage-{rng.randrange(world.num_stages)}")
    whole = world.kv_mib.read_text()
    world.kv_mib.write_text(str(max(1, int(whole) // 2)))
    try:
        process = psutil.Process(pid)
        process.kill()
        if not wait_until_gone(process, timeout_s=GONE_S):
            raise NotInjected(f"{name} survived SIGKILL")
        if not within(BACK_S, lambda: world.pids().get(name, pid) != pid and world.has_pipeline()):
            raise NotInjected(f"{name} did not come back within {BACK_S:.0f} s")
    finally:
        world.kv_mib.write_text(whole)


FAULTS: tuple[Fault, ...] = (Simple(kind="memory: a stage comes back with half the KV", inject=half, is_kill=True),)
