"""Clients that leave, cancel and run out of time, at the worst moment. Their jobs end as somebody
asked, or succeed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from uuid import UUID, uuid4

import httpx
import psycopg

from tests.chaos.faults.fault import Fault, NotInjected, Simple, hold
from tests.chaos.load.callers import openai_form
from tests.chaos.load.doors import gateway_client
from tests.chaos.load.journal import Asked
from tests.chaos.load.requests import INSERT, Request, row
from tests.chaos.load.target import Target
from tests.chaos.load.workload import PLAIN

NUM_JOBS = 8
JITTER_S = 0.15
"""Between two cancels: a short job takes about as long, so that some meet its end."""

DEADLINES_S = (0.05, 2.0)
PATIENCE_S = 10.0
CANCEL = "UPDATE jobs SET cancel_requested_at = now() WHERE id = %s"
THERE = "SELECT id FROM jobs WHERE id = ANY(%s)"


def insert(
    target: Target, rng: random.Random, *, ends: str, deadlines_s: tuple[float, float] | None
) -> list[UUID]:
    """Jobs of the fixed set that may also end as `ends`; committed when it returns."""
    workload = target.workload
    asked = [
        Asked(id=uuid4(), number=workload.draw(rng), door=ends, promised=True)
        for _ in range(NUM_JOBS)
    ]
    with psycopg.connect(target.database_url, connect_timeout=int(PATIENCE_S)) as connection:
        for each in asked:
            fields = workload.dressed(each.number, each.dress)
            if deadlines_s:
                fields["deadline_s"] = rng.uniform(*deadlines_s)
            connection.execute(INSERT, row(fields, each.id))
    for each in asked:
        each.ends = frozenset({"succeeded", ends})
        target.journal.ask(each)
    return [each.id for each in asked]


def cancel_against_finish(target: Target, rng: random.Random) -> None:
    """Cancels by SQL and by HTTP, milliseconds apart, while the jobs end."""
    urls = target.urls
    with psycopg.connect(target.database_url, autocommit=True) as connection:
        for job_id in insert(target, rng, ends="cancelled", deadlines_s=None):
            hold(rng.uniform(0.0, JITTER_S))
            if rng.random() < 0.5:
                connection.execute(CANCEL, (job_id,))
            else:
                _cancel_by_http(urls, job_id)


def _cancel_by_http(urls: Mapping[str, str], job_id: UUID) -> None:
    """A gateway that is being restarted does not answer: then it is no cancel."""
    try:
        with gateway_client(urls, PATIENCE_S) as client:
            client.delete(f"/v1/jobs/{job_id}")
    except httpx.HTTPError:
        return


def deadline_against_finish(target: Target, rng: random.Random) -> None:
    """Deadlines between a moment and the time that a job needs."""
    insert(target, rng, ends="expired", deadlines_s=DEADLINES_S)
    hold(DEADLINES_S[1])


def vanish(target: Target, rng: random.Random) -> None:
    """Readers of completions that hang up after a few events: the gateway cancels their jobs."""
    numbers = {uuid4(): target.workload.draw(rng) for _ in range(NUM_JOBS)}
    with gateway_client(target.urls, PATIENCE_S) as client:
        num_read = sum(
            _read_a_little(client, job_id, target.workload.requests[number], rng)
            for job_id, number in numbers.items()
        )
    with psycopg.connect(target.database_url) as connection:
        there = [row[0] for row in connection.execute(THERE, (list(numbers),))]
    for job_id in there:
        ends = frozenset({"succeeded", "cancelled"})
        target.journal.ask(Asked(id=job_id, number=numbers[job_id], door="vanished", ends=ends))
    if num_read == 0:
        raise NotInjected("no completion was streamed: is the gateway away?")


def _read_a_little(
    client: httpx.Client, job_id: UUID, request: Request, rng: random.Random
) -> bool:
    route, document = openai_form({**request, **PLAIN.fields})
    try:
        with client.stream(
            "POST", route, json={**document, "id": str(job_id), "stream": True}
        ) as answer:
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
