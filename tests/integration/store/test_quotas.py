"""Quotas on a real Postgres: reserved when a job is accepted, settled however it ends, never
exceeded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from typing import Any
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import Engine, text

from shardline.base.errors import Invalid, LimitExceeded
from shardline.contract.job import JobState
from shardline.store import jobs
from shardline.store.connection.database import connect
from shardline.store.inserts import StoredRequest, encode_choices, encode_request, insert_encoded
from shardline.store.statistics.usage import usage
from shardline.store.tenants import quotas
from shardline.store.tenants.quotas import TenantQuota
from shardline_server.store import ends, preparation
from shardline_server.store.ends import End
from tests.integration.rows import (
    cell,
    change,
    claim,
    database_with_head,
    end,
    release,
    request,
    success,
)

TOKENS = 10
"""That a job of `accept` reserves: 2 of its prompt, and at most 8."""
NUM_SUBMITTERS = 64


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    with database_with_head(database_url) as engine:
        limit(engine)
        yield engine


def limit(engine: Engine, key_name: str = "", **limits: Any) -> None:
    """Limits of the tenant `acme`."""
    with engine.begin() as connection:
        quotas.set_quota(connection, "acme", limits, key_name=key_name)


def accept(engine: Engine, num: int = 1, key: str | None = None, **fields: Any) -> list[Any]:
    """What becomes of requests in one transaction, as the gateway's batches: ids or errors."""
    wanted = [request(tenant="acme", **fields) for _ in range(num)]
    encoded = [replace(encode_request(one, ((5, 6), 8)), key_name=key) for one in wanted]
    with engine.begin() as connection:
        outcomes = insert_encoded(connection, encoded)
    return [one.job_id if isinstance(one, StoredRequest) else one for one in outcomes]


def accepted(outcomes: list[Any]) -> list[UUID]:
    return [one for one in outcomes if isinstance(one, UUID)]


def used(engine: Engine, key_name: str = "") -> TenantQuota:
    with engine.begin() as connection:
        found = quotas.list_quotas(connection)
    return next(one for one in found if (one.tenant, one.key_name) == ("acme", key_name))


def test_64_submitters_together_get_what_there_is_and_no_more(database_url: str) -> None:
    with database_with_head(database_url) as engine:
        limit(engine, requests_per_min=100, max_queued=1_000)
        limit(engine, key_name="k", tokens_per_min=90 * TOKENS)
        many = connect(database_url, pool_size=NUM_SUBMITTERS)
        start = threading.Barrier(NUM_SUBMITTERS)

        def submitter(number: int) -> list[Any]:
            start.wait(60)
            return [accept(many, key="k" if number % 2 else None)[0] for _ in range(3)]

        with ThreadPoolExecutor(NUM_SUBMITTERS) as pool:
            outcomes = [
                one for found in pool.map(submitter, range(NUM_SUBMITTERS)) for one in found
            ]
        many.dispose()
        stored = cell(engine, "SELECT count(*) FROM jobs")
        with_key = cell(engine, "SELECT count(*) FROM jobs WHERE key_name = 'k'")
        assert len(accepted(outcomes)) == stored == 100
        assert with_key <= 90
        assert used(engine).requests == used(engine).queued == 100
        assert used(engine, "k").tokens == with_key * TOKENS


def test_whatever_ends_a_job_settles_it_once(engine: Engine) -> None:
    limit(engine, budget_tokens=1_000)
    ids = accept(engine, 5)
    assert (used(engine).queued, used(engine).open_tokens) == (5, 5 * TOKENS)
    done, lost, given_back = claim(engine, ids[:3])
    assert used(engine).queued == 2
    for _ in range(2):
        end(engine, success(done, 7, 8, 9))
    release(engine, given_back)
    assert used(engine).queued == 3
    failed = End(job_id=lost.job_id, fence=1, state=JobState.FAILED, error={"code": "crashed"})
    end(engine, failed)
    cancelled = End(job_id=ids[3], fence=0, state=JobState.CANCELLED)
    with engine.begin() as connection:
        ends.end_queued(connection, [cancelled])
        ends.end_queued(connection, [cancelled])
        connection.execute(text("DELETE FROM jobs WHERE id = :id"), {"id": ids[4]})
    left = used(engine)
    assert (left.queued, left.open_tokens, left.spent_tokens) == (1, TOKENS, 5)
    assert left.tokens == 5 + TOKENS, "what was not used is free in this minute too"
    (again,) = claim(engine, [given_back.job_id])
    end(engine, success(again))
    assert (used(engine).queued, used(engine).open_tokens, used(engine).spent_tokens) == (0, 0, 9)
    assert cell(engine, "SELECT count(*) FROM reservations") == 0


def test_truncating_jobs_gives_back_what_they_held(engine: Engine) -> None:
    limit(engine, max_queued=2, budget_tokens=1_000)
    ids = accept(engine, 2)
    end(engine, success(claim(engine, ids[:1])[0], 7, 8, 9))
    accept(engine)
    assert isinstance(accept(engine)[0], LimitExceeded)

    change(engine, "TRUNCATE jobs CASCADE")

    left = used(engine)
    assert (left.queued, left.open_tokens, left.spent_tokens) == (0, 0, 5)
    assert cell(engine, "SELECT count(*) FROM reservations") == 0
    assert len(accepted(accept(engine, 2))) == 2


def test_requests_of_a_batch_that_find_room_are_stored_and_the_others_say_when(
    engine: Engine,
) -> None:
    limit(engine, requests_per_min=3)
    outcomes = accept(engine, 5)
    assert len(accepted(outcomes)) == 3
    refused = outcomes[-1]
    assert isinstance(refused, LimitExceeded)
    assert refused.retry_after_s is not None
    assert 0 < refused.retry_after_s <= 61
    assert refused.left == {"requests": (3, 0)}
    assert refused.as_dict()["code"] == "limit_exceeded"
    limit(engine, requests_per_min=None, tokens_per_min=TOKENS - 1)
    (never,) = accept(engine)
    assert never.retry_after_s is None


def test_a_repeat_takes_nothing_and_is_never_refused(engine: Engine) -> None:
    limit(engine, max_queued=2)
    (first,) = accept(engine, idempotency_key="one")
    assert accept(engine, 2, idempotency_key="two")[0] == accept(engine, idempotency_key="two")[0]
    assert used(engine).queued == 2
    assert accept(engine, idempotency_key="one") == [first]
    assert isinstance(accept(engine)[0], LimitExceeded)


def test_choices_find_room_together_or_not_at_all(engine: Engine) -> None:
    limit(engine, max_queued=3, requests_per_min=100)

    def choices(num: int) -> Any:
        wanted = [request(tenant="acme")] * num
        with engine.begin() as connection:
            return insert_encoded(connection, [encode_choices(wanted, [((5, 6), 8)] * num)])[0]

    assert len(choices(3).others) == 2
    assert isinstance(choices(2), LimitExceeded)
    assert cell(engine, "SELECT count(*) FROM jobs") == used(engine).queued == 3


def test_plain_sql_is_held_to_the_same_limits(engine: Engine, database_url: str) -> None:
    limit(engine, max_queued=2)
    one = "INSERT INTO jobs (tenant_id, model, prompt) VALUES ('acme', 'm', 'text')"
    with psycopg.connect(database_url, autocommit=True) as plain:
        plain.execute(f"{one}, ('acme', 'm', 'text')")
        with pytest.raises(psycopg.errors.ConfigurationLimitExceeded, match="2 of 2"):
            plain.execute(one)
    assert used(engine).queued == 2


def test_preparation_corrects_what_a_text_has_reserved(engine: Engine) -> None:
    limit(engine, budget_tokens=100)
    with engine.begin() as connection:
        (stored,) = jobs.insert_jobs(connection, [request(tenant="acme", max_tokens=8)])
    assert used(engine).open_tokens == 32, "the model's context"
    ready = preparation.PreparedJob(
        id=stored.job_id, model="m", prompt_ids=[5, 6], max_tokens=8, seed=None
    )
    with engine.begin() as connection:
        preparation.mark_if_unprepared(connection, [ready])
    assert used(engine).open_tokens == used(engine).tokens == TOKENS


def test_money_is_reserved_at_the_highest_and_settled_at_what_it_was(engine: Engine) -> None:
    with engine.begin() as connection:
        quotas.set_price(connection, "m", Decimal(1_000_000), Decimal(2_000_000))
    limit(engine, budget_money=Decimal(40))
    ids = accepted(accept(engine, 3))
    assert len(ids) == 2, "each may cost 2 + 16"
    assert used(engine).open_money == 36
    for one in claim(engine, ids):
        end(engine, success(one))
    left = used(engine)
    assert left.open_money == 0
    assert left.spent_money == 12
    with engine.begin() as connection:
        (row,) = usage(connection, num_days=1, by=["tenant", "model"])
    assert (row.tenant, row.num_requests, row.completion_tokens) == ("acme", 2, 4)
    assert row.money == 12


def test_a_tenant_without_quotas_waits_for_nobody(engine: Engine) -> None:
    limit(engine, max_queued=10)
    with engine.begin() as holder:
        holder.execute(text("SELECT FROM quota_use FOR UPDATE"))
        with engine.begin() as connection:
            connection.execute(text("SET LOCAL lock_timeout = '1s'"))
            jobs.insert_jobs(connection, [request()])
            connection.execute(text("INSERT INTO jobs (model, prompt) VALUES ('m', 'text')"))
    assert cell(engine, "SELECT count(*) FROM reservations") == 0


@pytest.mark.parametrize(
    "limits",
    [
        {"max_queued": -1},
        {"max_queued": Decimal("1.5")},
        {"queues": 1},
        {"budget_period": "week"},
        {"max_bytes": 1e300},
    ],
)
def test_a_wrong_limit_is_refused(engine: Engine, limits: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        limit(engine, **limits)


def test_no_more_jobs_run_than_a_tenant_may_however_many_heads_claim(engine: Engine) -> None:
    limit(engine, max_running=3)
    limit(engine, key_name="k", max_running=1)
    ids = accepted(accept(engine, 6)) + accepted(accept(engine, 2, key="k"))
    with ThreadPoolExecutor(4) as heads:
        claimed = [
            one for found in heads.map(lambda _: claim(engine, ids), range(4)) for one in found
        ]
    running = "SELECT count(*) FROM jobs WHERE state = 'running'"
    assert len(claimed) == cell(engine, running) == 3
    assert cell(engine, f"{running} AND key_name = 'k'") <= 1
    end(engine, success(claimed[0]))
    with engine.begin() as connection:
        connection.execute(text("UPDATE jobs SET not_before = now()"))
    assert len(claim(engine, ids)) == 1
