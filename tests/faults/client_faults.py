"""Clients that leave, cancel and run out of time, at the worst moment. Their jobs end as somebody asked, or succeed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from uuid import UUID, uuid4

import httpx
import psycopg

from shardline.api_key import bearer
from tests.faults.fault import Fault, NotInjected, Simple, hold
from tests.faults.journal import Asked
from tests.faults.requests import NUM_REQUESTS, columns, request
from tests.faults.target import Target

NUM_JOBS = 8
JITTER_S = 0.15
"""Between two cancels: a short job takes about as long, so that some meet its end."""

DEADLINES_S = (0.05, 2.0)
PATIENCE_S = 10.0
INSERT = """
INSERT INTO jobs (id, model, prompt, params, max_crashes, deadline_at)
VALUES (%s, %s, %s, %s, %s, now() + make_interval(secs => %s))
"""
CANCEL = "UPDATE jobs SET cancel_requested_at = now() WHERE id = %s"
THERE = "SELECT id FROM jobs WHERE id = ANY(%s)"


def insert(world: Target, rng: random.Random, *, ends: str, deadlines_s: tuple[float, float] | None) -> list[UUID]:
    """Jobs of the fixed set that may also end as `ends`; committed when it returns."""
    asked = [Asked(id=uuid4(), number=rng.randrange(NUM_REQUESTS), door=ends, promised=True) for _ in range(NUM_JOBS)]
    with psycopg.connect(world.database_url, connect_timeout=int(PATIENCE_S)) as connection:
        for each in asked:
            deadline_s = rng.uniform(*deadlines_s) if deadlines_s else None
            connection.execute(INSERT, (each.id, *columns(request(each.number)), deadline_s))
    for each in asked:
        each.ends = frozenset({"succeeded", ends})
        world.journal.ask(each)
    return [each.id for each in asked]


def cancel_against_finish(world: Target, rng: random.Random) -> None:
    """Cancels by SQL and by HTTP, milliseconds apart, while the jobs end."""
    urls = world.urls
    with psycopg.connect(world.database_url, autocommit=True) as connection:
        for job_id in insert(world, rng, ends="cancelled", deadlines_s=None):
            hold(rng.uniform(0.0, JITTER_S))
            if rng.random() < 0.5:
                connection.execute(CANCEL, (job_id,))
            else:
                _cancel_by_http(urls, job_id)


def _cancel_by_http(urls: Mapping[str, str], job_id: UUID) -> None:
    """A gateway that is being restarted does not answer: then it is no cancel."""
    try:
        key = bearer(urls["api_key"])
        httpx.delete(f"{urls['gateway']}/v1/jobs/{job_id}", headers=key, timeout=PATIENCE_S)
    except httpx.HTTPError:
        return


def deadline_against_finish(world: Target, rng: random.Random) -> None:
    """Deadlines between a moment and the time that a job needs."""
    insert(world, rng, ends="expired", deadlines_s=DEADLINES_S)
    hold(DEADLINES_S[1])


def vanish(world: Target, rng: random.Random) -> None:
    """Readers of completions that hang up after a few events: the gateway cancels their jobs."""
    numbers = {uuid4(): rng.randrange(NUM_REQUESTS) for _ in range(NUM_JOBS)}
    urls = world.urls
    with httpx.Client(base_url=urls["gateway"], headers=bearer(urls["api_key"]), timeout=PATIENCE_S) as client:
        num_read = sum(_read_a_little(client, job_id, number, rng) for job_id, number in numbers.items())
    with psycopg.connect(world.database_url) as connection:
        there = [row[0] for row in connection.execute(THERE, (list(numbers),))]
    for job_id in there:
        ends = frozenset({"succeeded", "cancelled"})
        world.journal.ask(Asked(id=job_id, number=numbers[job_id], door="vanished", ends=ends))
    if num_read == 0:
        raise NotInjected("no completion was streamed: is the gateway away?")


def _read_a_little(client: httpx.Client, job_id: UUID, number: int, rng: random.Random) -> bool:
    document = {**request(number), "id": str(job_id), "stream": True}
    try:
        with client.stream("POST", "/v1/completions", json=document) as answer:
            answer.raise_for_status()
            lines = answer.iter_lines()
            for _ in range(rng.randrange(6)):
                next(lines, None)
    except httpx.HTTPError:
        return False
    return True


FAULTS: tuple[Fault[Target], ...] = (
    Simple(kind="client: readers vanish", inject=vanish),
    Simple(kind="client: cancel against finish", inject=cancel_against_finish),
    Simple(kind="client: deadline against finish", inject=deadline_against_finish),
)
