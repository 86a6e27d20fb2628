"""Long prompts, and a short one of the same priority right behind them: it must not wait until all
are computed.

Orders first tokens by rows alone: no time is judged. Where KV is short the long ones wait for it,
and nothing is shown.
"""

from __future__ import annotations

import random
from uuid import UUID

import psycopg

from shardline.client import Client
from tests.chaos.faults.fault import Broken, Fault, NotInjected, Simple
from tests.chaos.load.requests import MODEL
from tests.chaos.load.users import CLERK
from tests.chaos.stack.local_target import LocalTarget
from tests.polling import within

LENGTHS = (CLERK.limit - 2, CLERK.limit - 2, CLERK.limit - 2, 64)
"""Each long one is about a step of its own. More of them would rightly leave the short one nothing
of a step."""
TRIES = 5
MOST_LATE = 2
"""Now and then a message comes so late that the long ones are through."""
END_S = 180.0
"""Beside other work the jobs that run may take a minute to give back their KV."""
FIRST_TOKENS = """
SELECT started_at + make_interval(secs => (timings ->> 'first_token_s')::float8)
FROM results JOIN attempts USING (job_id, fence)
WHERE job_id = ANY(%s) ORDER BY array_position(%s, job_id)
"""


def short_behind_long(target: LocalTarget, rng: random.Random) -> None:
    """In one call, in this order, before all else that waits. They are not of the load: nobody else
    judges them."""
    with Client(database_url=target.database_url, redis_url=target.redis_url) as client:
        num_late = sum(_is_late(target, client, rng) for _ in range(TRIES))
    if num_late > MOST_LATE:
        raise Broken(
            f"a short prompt waited for all long ones before it in {num_late} of {TRIES} tries"
        )


def _is_late(target: LocalTarget, client: Client, rng: random.Random) -> bool:
    prompts = [rng.choices(range(CLERK.first_id, CLERK.vocab_size), k=length) for length in LENGTHS]
    ids = client.submit_many(
        [{"model": MODEL, "prompt": one, "max_tokens": 1, "priority": 0} for one in prompts]
    )
    if not within(END_S, lambda: all(job.state.terminal for job in client.get_many(ids))):
        raise NotInjected(f"they have not ended within {END_S:.0f} s")
    *_, last, short = _first_tokens(target, ids)
    return bool(short > last)


def _first_tokens(target: LocalTarget, ids: list[UUID]) -> list[float]:
    with psycopg.connect(target.database_url) as connection:
        return [row[0].timestamp() for row in connection.execute(FIRST_TOKENS, (ids, ids))]


FAULTS: tuple[Fault, ...] = (
    Simple(
        kind="prefill: a short prompt behind long ones",
        inject=short_behind_long,
        why_not=lambda target: None if target.workload.generates else "texts are one step each",
    ),
)
