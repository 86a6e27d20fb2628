"""Tenants that wait for one model get its tokens by their weights, however long their queues are:
a relay's window and a head of four seats, on a real Postgres."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from uuid import UUID

import pytest
from sqlalchemy import Engine

from shardline.store import jobs
from shardline.store.tenants import quotas
from shardline_server.store import outbox
from shardline_server.store.claims import ClaimedJob
from tests.integration.rows import (
    LONG_S,
    cell,
    claim,
    database_with_head,
    end,
    request,
    submit,
    success,
)

NUM_SEATS = 4
NUM_PROMPT = 2


class FewSeats:
    """A head that gets jobs in the order in which they are sent, with a relay before it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sent: deque[UUID] = deque()
        self._running: deque[ClaimedJob] = deque()

    def run(self, num_turns: int, lengths: Mapping[str, int]) -> Counter[str]:
        """Tokens by tenant in so many turns of the relay; a job says `lengths` of its tenant."""
        had: Counter[str] = Counter()
        for _ in range(num_turns):
            with self._engine.begin() as connection:
                sends = outbox.stamp_due(connection, resend_s=LONG_S)
            self._sent.extend(send.job_id for send in sends)
            ids = [self._sent.popleft() for _ in range(min(NUM_SEATS, len(self._sent)))]
            self._running.extend(claim(self._engine, ids))
            ending = [self._running.popleft() for _ in range(len(self._running))]
            for one in ending:
                had[one.tenant_id] += NUM_PROMPT + lengths[one.tenant_id]
            end(self._engine, *(success(one, *range(lengths[one.tenant_id])) for one in ending))
        return had


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    with database_with_head(database_url) as engine:
        yield engine


def weigh(engine: Engine, tenant: str, weight: float) -> None:
    with engine.begin() as connection:
        quotas.set_weight(connection, tenant, weight)


def wait_for(engine: Engine, tenant: str, num: int, priority: int = 5) -> None:
    """Prepared jobs of a tenant that come now."""
    wanted = [request(tenant=tenant, priority=priority)] * num
    with engine.begin() as connection:
        jobs.insert_jobs(connection, wanted, prepared=[((5, 6), 8)] * num)


def test_a_hundred_times_the_queue_is_no_larger_share(engine: Engine) -> None:
    for tenant in ("large", "small"):
        weigh(engine, tenant, 1)
    wait_for(engine, "large", 4_000)
    head = FewSeats(engine)
    head.run(3, {"large": 8})
    wait_for(engine, "small", 100)
    head.run(16, {"large": 8, "small": 8})
    wait_for(engine, "small", 100)
    had = head.run(30, {"large": 8, "small": 8})
    assert had["small"] == pytest.approx(had["large"], rel=0.1)


def test_shares_are_of_tokens_and_not_of_jobs(engine: Engine) -> None:
    for tenant in ("long", "short"):
        weigh(engine, tenant, 1)
        wait_for(engine, tenant, 400)
    had = FewSeats(engine).run(76, {"long": 8, "short": 2})
    assert had["short"] == pytest.approx(had["long"], rel=0.1)


def test_three_tenants_have_shares_by_their_weights(engine: Engine) -> None:
    for tenant, weight in (("one", 1), ("two", 2), ("four", 4)):
        weigh(engine, tenant, weight)
        wait_for(engine, tenant, 300)
    head = FewSeats(engine)
    lengths = dict.fromkeys(("one", "two", "four"), 4)
    head.run(16, lengths)
    had = head.run(50, lengths)
    assert had["two"] == pytest.approx(2 * had["one"], rel=0.1)
    assert had["four"] == pytest.approx(4 * had["one"], rel=0.1)


def test_who_did_not_wait_has_saved_nothing_up(engine: Engine) -> None:
    for tenant in ("busy", "late"):
        weigh(engine, tenant, 1)
    wait_for(engine, "busy", 600)
    wait_for(engine, "late", 1)
    head = FewSeats(engine)
    head.run(40, {"busy": 8, "late": 8})
    wait_for(engine, "late", 300)
    head.run(16, {"busy": 8, "late": 8})
    had = head.run(30, {"busy": 8, "late": 8})
    assert had["late"] == pytest.approx(had["busy"], rel=0.1)


def test_a_window_keeps_to_a_limit_of_running_jobs(engine: Engine) -> None:
    with engine.begin() as connection:
        quotas.set_quota(connection, "few", {"max_running": 3})
    wait_for(engine, "few", 20)
    submit(engine, 5)
    with engine.begin() as connection:
        sent = outbox.stamp_due(connection, resend_s=LONG_S)
    assert len(sent) == 8
    few = "SELECT count(*) FROM jobs WHERE tenant_id = 'few' AND sent_at IS NOT NULL"
    assert cell(engine, few) == 3
