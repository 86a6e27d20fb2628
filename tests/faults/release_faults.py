"""Two releases at once: the next one's door beside this one's heads, and an upgrade in the order of docs/operating.md.

The next release is played: its schema is `next_release`, its door stores a sampling parameter that nobody here knows.
"""

from __future__ import annotations

import json
import random
from uuid import uuid4

from tests.faults.deploy_faults import terminate
from tests.faults.fault import Broken, Fault, Simple
from tests.faults.journal import Asked
from tests.faults.migration_faults import alembic, doors_open, must_end, version
from tests.faults.postgres_faults import session
from tests.faults.requests import MODEL
from tests.faults.workload import MARK
from tests.faults.world import World

NUM_JOBS = 3
UNKNOWN = {"mirostat_of_the_next_release": 2}
END_S = 60.0
ENDS = frozenset({"succeeded", "failed"})
"""A head that does not know a parameter may refuse the job by name. It may not die of it."""

PREPARED = """
INSERT INTO jobs (id, model, prompt, prompt_ids, params, seed, metadata, max_tokens, prepared_at)
SELECT %(id)s, %(model)s, jobs.prompt, jobs.prompt_ids, %(params)s, %(seed)s, %(metadata)s, %(max_tokens)s, now()
FROM jobs WHERE model = %(model)s AND prompt = %(prompt)s AND prepared_at IS NOT NULL LIMIT 1
"""
NUMBER = 0
"""A greedy request of either set, with a text."""


def newer_door(world: World, rng: random.Random) -> None:
    """It tokenises and stores by itself, so that only a head meets the parameter."""
    heads = {name: pid for name, pid in world.pids().items() if name.startswith("stage-0")}
    request = world.workload.requests[NUMBER]
    params = {name: request[name] for name in ("max_tokens", "ignore_eos", "temperature")}
    asked = [Asked(id=uuid4(), number=NUMBER, door="next release", ends=ENDS, promised=True) for _ in range(NUM_JOBS)]
    with session(world) as connection:
        for each in asked:
            values = {"id": each.id, "model": MODEL, "seed": request["seed"], "metadata": json.dumps(MARK)}
            values |= {"params": json.dumps({**params, **UNKNOWN}), "prompt": request["prompt"]}
            connection.execute(PREPARED, {**values, "max_tokens": request["max_tokens"]})
            world.journal.ask(each)
    for each in asked:
        if not world.journal.wait_for(each.id, END_S):
            raise Broken(f"a job with an unknown parameter has not ended within {END_S:.0f} s")
    now = world.pids()
    died = [name for name, pid in heads.items() if now.get(name) != pid]
    if died:
        raise Broken(f"{', '.join(died)} died of an unknown parameter")


def upgrade(world: World, rng: random.Random) -> None:
    """The schema while everything runs; relays, gateways, heads, the stages behind them; then a newer door's jobs; and
    the schema back."""
    with doors_open(world):
        old = version(world)
        must_end(alembic(world, "upgrade", "head"))
    for role in ("relay", "gateway", *(f"stage-{index}" for index in range(world.num_stages))):
        terminate(role).strike(world, rng)
    newer_door(world, rng)
    must_end(alembic(world, "downgrade", old))


FAULTS: tuple[Fault, ...] = (
    Simple(kind="release: a newer door beside older heads", inject=newer_door),
    Simple(kind="release: upgrade in the documented order", inject=upgrade),
)
