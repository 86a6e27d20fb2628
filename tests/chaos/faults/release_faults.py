"""Two releases at once: the next one's door beside this one's heads, and an upgrade in the order of
docs/operating/upgrade.md.

The next release is played: its schema is `next_release`, its door stores a sampling parameter that
nobody here knows.
"""

from __future__ import annotations

import json
import random
from uuid import uuid4

from tests.chaos.faults.deploy_faults import terminate
from tests.chaos.faults.fault import Broken, Fault, Simple, hold
from tests.chaos.faults.migration_faults import alembic, doors_open, must_end, version
from tests.chaos.faults.postgres_faults import session
from tests.chaos.load.journal import Asked
from tests.chaos.load.requests import MODEL
from tests.chaos.load.workload import MARK
from tests.chaos.stack.local_target import LocalTarget

NUM_JOBS = 3
UNKNOWN = {"mirostat_of_the_next_release": 2}
LEASES = 3.0
END_S = 60.0
ENDS = frozenset({"cancelled"})
"""They wait for a head of their release. There is none, so somebody cancels them."""

PREPARED = """
INSERT INTO jobs (id, model, prompt, prompt_ids, params, seed, metadata, max_tokens, prepared_at)
SELECT %(id)s, %(model)s, jobs.prompt, jobs.prompt_ids, %(params)s, %(seed)s, %(metadata)s,
    %(max_tokens)s, now()
FROM jobs WHERE model = %(model)s AND prompt = %(prompt)s AND prepared_at IS NOT NULL LIMIT 1
"""
STRANGE = (
    "SELECT id, state, crashes, error FROM jobs"
    " WHERE id = ANY(%s) AND (state, crashes) <> ('queued', 0)"
)
CANCEL = "UPDATE jobs SET cancel_requested_at = now() WHERE id = ANY(%s)"
PARAMS = ("max_tokens", "ignore_eos", "temperature")
NUMBER = 0
"""A greedy request of either set, with a text."""


def newer_door(target: LocalTarget, rng: random.Random) -> None:
    """It tokenizes and stores by itself, so that only a head meets the parameter. No head may run
    the job without it, end it, or die of it."""
    heads = {name: pid for name, pid in target.pids().items() if name.startswith("stage-0")}
    request = target.workload.requests[NUMBER]
    params = {name: request[name] for name in PARAMS if name in request}
    asked = [
        Asked(id=uuid4(), number=NUMBER, door="next release", ends=ENDS, promised=True)
        for _ in range(NUM_JOBS)
    ]
    with session(target) as connection:
        for each in asked:
            values = {
                "id": each.id,
                "model": MODEL,
                "seed": request["seed"],
                "metadata": json.dumps(MARK),
            }
            values |= {"params": json.dumps({**params, **UNKNOWN}), "prompt": request["prompt"]}
            connection.execute(PREPARED, {**values, "max_tokens": request.get("max_tokens", 1)})
            target.journal.ask(each)
    hold(LEASES * target.times.lease_s)
    now = target.pids()
    ids = [each.id for each in asked]
    with session(target) as connection:
        strange = connection.execute(STRANGE, (ids,)).fetchall()
        connection.execute(CANCEL, (ids,))
    died = [name for name, pid in heads.items() if now.get(name) != pid]
    if died:
        raise Broken(f"{', '.join(died)} died of an unknown parameter")
    if strange:
        raise Broken(f"jobs with an unknown parameter do not wait: {strange}")
    for job_id in ids:
        if not target.journal.wait_for(job_id, END_S):
            raise Broken(
                f"job {job_id}, which waits for a newer head, was not cancelled"
                f" within {END_S:.0f} s"
            )


def upgrade(target: LocalTarget, rng: random.Random) -> None:
    """The schema while everything runs; relays, gateways, heads, the stages behind them; then a
    newer door's jobs; and the schema back."""
    with doors_open(target):
        old = version(target)
        must_end(alembic(target, "upgrade", "head"))
    for role in ("relay", "gateway", *(f"stage-{index}" for index in range(target.num_stages))):
        terminate(role).strike(target, rng)
    newer_door(target, rng)
    must_end(alembic(target, "downgrade", old))


FAULTS: tuple[Fault, ...] = (
    Simple(kind="release: a newer door beside older heads", inject=newer_door),
    Simple(kind="release: upgrade in the documented order", inject=upgrade),
)
