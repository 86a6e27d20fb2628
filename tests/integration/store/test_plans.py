"""Every statement of the store on tables with many rows: found by an index, and not thrown away
after it was read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text

from shardline.base.errors import Invalid
from shardline.contract.ids import new_id
from shardline.contract.job import JobState
from shardline.contract.job_filter import JobFilter
from shardline.contract.parents.parent_job import ParentJob
from shardline.contract.tables import TERMINAL
from shardline.store import bulk_acts, dead_letters, jobs, listing
from shardline.store.bulk_acts import Act, BulkProgress
from shardline.store.statistics import demand
from shardline_server.store import (
    claims,
    crashes,
    ends,
    leases,
    outbox,
    parents,
    paused_jobs,
    preparation,
    retention,
    sweeps,
)
from shardline_server.store.ends import End
from shardline_server.store.leases import Beat
from shardline_server.store.preparation import PreparedJob
from tests.integration.rows import HEAD, LONG_S, MODEL, database_with_head, request

LARGE = ("jobs", "attempts", "results")
NUM_WAITING = 12_000
NUM_ENDED = 20_000

MAX_WASTED = 512
"""Rows that a node may read in vain: as many as are sent ahead, or run. Everything else has
thousands."""

MAX_READ = 4_000
"""Rows that a node may give to the one above: more than any batch or page. Counts are bounded by
their own limits."""

UNEXPLAINED = ("advisory", "pg_notify", "SET CONSTRAINTS", "SAVEPOINT")

# Two tenants, a common and a rare model. Of those that wait a fifth is delayed, of those that ended
# most succeeded.
ROWS = f"""
INSERT INTO tenants (id) VALUES ('other');
INSERT INTO jobs (id, tenant_id, model, prompt, prompt_ids, max_tokens, priority, created_at,
    prepared_at, not_before, idempotency_key)
SELECT gen_random_uuid(), CASE n %% 10 WHEN 0 THEN 'other' ELSE 'default' END,
    CASE n %% 400 WHEN 0 THEN 'rare' ELSE 'm' END, 'text', '{{5,6}}', 8, n %% 10,
    now() - make_interval(secs => n), now(),
    now() + make_interval(secs => CASE n %% 5 WHEN 0 THEN 3600 ELSE 0 END), 'waits ' || n
FROM generate_series(1, {NUM_WAITING}) AS n;
INSERT INTO jobs (id, tenant_id, model, prompt, prompt_ids, max_tokens, created_at, prepared_at,
    fence, state, finished_at, error)
SELECT gen_random_uuid(), CASE n %% 10 WHEN 0 THEN 'other' ELSE 'default' END,
    CASE n %% 400 WHEN 0 THEN 'rare' ELSE 'm' END, 'text', '{{5,6}}', 8,
    now() - make_interval(secs => 20000 + n), now(), 1,
    CASE n %% 500 WHEN 1 THEN 'failed' WHEN 2 THEN 'cancelled' WHEN 3 THEN 'expired'
        ELSE 'succeeded' END,
    now() - make_interval(secs => n),
    CASE WHEN n %% 500 = 1 THEN '{{"code": "crashed"}}'::jsonb END
FROM generate_series(1, {NUM_ENDED}) AS n;
INSERT INTO attempts (job_id, fence, pipeline, epoch, worker, fingerprint, exactness, outcome,
    ended_at)
SELECT id, 1, 'p', 1, 'h', 'w', 'x', state, now() FROM jobs WHERE fence = 1;
INSERT INTO results (job_id, fence, text, token_ids, prompt_tokens, completion_tokens,
    finish_reason, exact)
SELECT id, 1, 'text', '{{7}}', 2, 1, 'stop', true FROM jobs WHERE state = 'succeeded';
INSERT INTO models (name, context_length, vocab_size, tokenizer, fingerprint)
VALUES ('rare', 32, 100, '', 'w');
"""

BATCH = "01890000-0000-7000-8000-000000000000"

# Some jobs have a tag, in each state. Of many batches one has 500 lines, of which the first has a
# second choice.
TAGS_AND_BATCHES = f"""
UPDATE jobs SET metadata = '{{"team": "a"}}'
WHERE idempotency_key LIKE 'waits 7%%00' OR state = 'failed';
INSERT INTO batches (id, tenant_id, endpoint, input_file_id, completion_window, status, expires_at,
    num_lines, last_line, next_line, next_byte, first_open, due_at, fence)
SELECT CASE n WHEN 0 THEN '{BATCH}' ELSE gen_random_uuid() END, 'default', '/v1/completions',
    '{BATCH}', '24h', 'in_progress', now(), 500, 500, 501, 0, 1, now(), 0
FROM generate_series(0, 40) AS n;
INSERT INTO batch_lines (batch_id, line, job_id, num_jobs, num_choices)
SELECT batches.id, n, gen_random_uuid(), 1, 1 FROM batches, generate_series(1, 500) AS n
WHERE batches.id <> '{BATCH}';
INSERT INTO batch_lines (batch_id, line, job_id, num_jobs, num_choices)
SELECT '{BATCH}', row_number() OVER (), id, 1, 1 FROM (
    (SELECT id FROM jobs WHERE state = 'queued' AND priority < 9 LIMIT 460)
    UNION ALL (SELECT id FROM jobs WHERE state = 'failed' LIMIT 40)) AS jobs;
UPDATE batch_lines SET num_jobs = 2, num_choices = 2 WHERE batch_id = '{BATCH}' AND line = 1;
INSERT INTO jobs (model, prompt, choice_of, choice_index)
SELECT 'm', 'text', job_id, 1 FROM batch_lines WHERE batch_id = '{BATCH}' AND line = 1;
"""
NUM_OF_BATCH = {Act.CANCEL: 461, Act.RETRY: 40, Act.PRIORITIZE: 461}


@pytest.fixture(scope="module")
def plans() -> list[tuple[str, dict[str, Any]]]:
    """Of every statement that ran, with what it read."""
    return []


@pytest.fixture
def engine(database_url: str, plans: list[tuple[str, dict[str, Any]]]) -> Iterator[Engine]:
    """One with many rows, in which each statement is explained before it runs."""
    with database_with_head(database_url) as engine:
        with engine.begin() as connection:
            connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
            connection.exec_driver_sql(ROWS)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql(
                "VACUUM (ANALYZE) jobs, attempts, results, tenants, pipelines, models"
            )
        plans.clear()

        @event.listens_for(engine, "before_cursor_execute")
        def explain(
            _connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any
        ) -> None:
            if any(word in statement for word in UNEXPLAINED):
                return
            cursor.execute("SAVEPOINT explained")
            cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters)
            plans.append((statement, cursor.fetchone()[0][0]["Plan"]))
            cursor.execute("ROLLBACK TO explained")

        yield engine


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The plan's and those below."""
    yield plan
    for inner in plan.get("Plans", ()):
        yield from nodes(inner)


def faults(plans: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """What a plan must not do, with its statement."""
    found = []
    for statement, plan in plans:
        for node in nodes(plan):
            name = node.get("Relation Name")
            kind = node["Node Type"]
            loops = node["Actual Loops"]
            if node.get("Rows Removed by Join Filter", 0) * loops > MAX_WASTED:
                found.append(f"{kind} compares each with each: {statement}")
            if name not in LARGE or loops == 0:
                continue
            if node["Actual Rows"] * loops > MAX_READ and "count(*)" not in statement:
                found.append(
                    f"{kind} reads {node['Actual Rows'] * loops} rows of {name}: {statement}"
                )
            wasted = sum(
                node.get(f"Rows Removed by {how}", 0) for how in ("Filter", "Index Recheck")
            )
            if kind == "Seq Scan":
                found.append(f"reads all of {name}: {statement}")
            elif wasted > max(node["Actual Rows"], MAX_WASTED):
                found.append(
                    f"{kind} of {name} wastes {wasted} for {node['Actual Rows']}: {statement}"
                )
    return found


def all_reads(plans: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Where a plan reads a table from end to end: row by row, or in the order of its times."""
    found = []
    for statement, plan in plans:
        for node in nodes(plan):
            is_read = node.get("Relation Name") in ("jobs", "batch_lines") and node["Actual Loops"]
            is_walk = (
                node.get("Index Name") == "jobs_listing"
                and node.get("Rows Removed by Filter", 0) > MAX_WASTED
            )
            if is_read and (is_walk or "Seq Scan" in node["Node Type"]):
                found.append(f"{node['Node Type']} of {node['Relation Name']}: {statement}")
    return found


def some(connection: Connection, where: str, limit: int = 8) -> list[Any]:
    """Ids of rows, read without a plan of ours."""
    query = f"/* advisory */ SELECT id FROM jobs WHERE {where} LIMIT {limit}"
    return list(connection.scalars(text(query)))


def test_every_filtered_page_walks_an_index(
    engine: Engine, plans: list[tuple[str, dict[str, Any]]]
) -> None:
    filters = itertools.product(
        [None, *JobState], [None, "m", "rare", "none"], [None, "default", "other"], [False, True]
    )
    for state, model, tenant, is_next in filters:
        with engine.begin() as connection:
            after = None
            if is_next:
                where = "created_at < now() - interval '5 hours'"
                (after,) = some(
                    connection, f"{where} AND tenant_id = '{tenant}'" if tenant else where, 1
                )
            page = listing.list_jobs(
                connection, state=state, model=model, tenant=tenant, limit=50, after=after
            )
        assert all(state in (None, job.state) and model in (None, job.model) for job in page)
        assert [(job.created_at, job.id) for job in page] == sorted(
            (job.created_at, job.id) for job in page
        )[::-1]
    for model, is_next in itertools.product([None, "m", "rare"], [False, True]):
        with engine.begin() as connection:
            after = listing.list_dead(connection, limit=3)[-1].id if is_next else None
            assert (
                listing.list_dead(connection, model=model, limit=10, after=after) or model == "rare"
            )
    assert faults(plans) == []


def test_every_statement_of_doors_and_relays_finds_its_rows_by_an_index(
    engine: Engine, plans: list[tuple[str, dict[str, Any]]]
) -> None:
    with engine.begin() as connection:
        keyed = [
            request(idempotency_key=f"waits {number}", prompt="text")
            for number in range(1, 300, 10)
            if number % 10 == 1
        ]
        assert not any(
            one.is_new
            for one in jobs.insert_jobs(connection, keyed, prepared=[((5, 6), 8)] * len(keyed))
        )
        own = [request(id=new_id()) for _ in range(30)]
        assert all(one.is_new for one in jobs.insert_jobs(connection, own))
        jobs.insert_jobs(connection, own)
        refused = jobs.FailedRequest(id=new_id(), model="m", error=Invalid("a", "b", "c").as_dict())
        jobs.insert_failed(connection, [refused])
        ids = some(connection, "state = 'succeeded'")
        assert len(jobs.get_jobs(connection, ids)) == len(jobs.ended(connection, ids)) == len(ids)
        ids = some(connection, "state = 'succeeded' AND tenant_id = 'default'")
        waited = tuple(ParentJob(job=job_id) for job_id in ids)
        (child,) = jobs.insert_jobs(connection, [request(depends_on=waited)])
        assert parents.release(connection) is False
        assert parents.failure(connection, child.job_id) is None
        assert len(parents.parent_texts(connection, child.job_id, ids)) == len(ids)
        # A bulk load that Postgres has not analyzed yet.
        load = "SELECT 'm', 'text' FROM generate_series(1, 5000)"
        connection.execute(text(f"/* advisory */ INSERT INTO jobs (model, prompt) {load}"))
        rows = preparation.take_unprepared(connection, lease_s=LONG_S)
        ready = [
            PreparedJob(id=row.id, model=MODEL, prompt_ids=(5,), max_tokens=1, seed=None)
            for row in rows[1:]
        ]
        assert preparation.mark_if_unprepared(connection, ready) == len(rows) - 1 > 0
        assert preparation.fail_if_unprepared(connection, {rows[0].id: {"code": "invalid"}}) == [
            rows[0].id
        ]
        dead = listing.list_dead(connection)[0].id
        dead_letters.replay(connection, dead)
        assert dead_letters.get_dead(connection, dead).replays
        assert jobs.request_cancel(connection, some(connection, "state = 'queued' AND fence = 0"))
        assert sweeps.sweep_stopped_queued(connection, lambda *_: "") == {}
        assert sweeps.count_active(connection)
        assert demand.oldest_queued(connection)["m"] > 0
        assert demand.demand(connection, "m", window_s=900).num_arrived > 0
        change = "/* advisory */ INSERT INTO pauses (kind, target) VALUES ('tag', 'a=b')"
        connection.execute(text(change))
        assert paused_jobs.settle(connection) == 0
        sent = outbox.stamp_due(connection, resend_s=1.0)
        outbox.unstamp(connection, [one.job_id for one in sent[:8]])
        assert outbox.unstamp_sent(connection) == len(sent) - 8
    assert faults(plans) == []


def test_every_statement_of_heads_finds_its_rows_by_an_index(
    engine: Engine, plans: list[tuple[str, dict[str, Any]]]
) -> None:
    times: Any = {"lease_s": LONG_S, "exact_wait_s": LONG_S}
    with engine.begin() as connection:
        ids = some(connection, "state = 'queued' AND model = 'm' AND not_before <= now()", 40)
        assert crashes.quarantined(connection, [str(job_id) for job_id in ids]) == []
        claimed = claims.claim(connection, ids, HEAD, **times)
        keys = [(one.job_id, one.fence) for one in claimed]
        beats = [Beat(job_id=job_id, fence=fence, start=0, ids=(7,)) for job_id, fence in keys]
        assert len(leases.heartbeat(connection, beats, lease_s=LONG_S)) == len(ids) == 40
        failed = [
            End(job_id=job_id, fence=fence, state=JobState.FAILED, error={})
            for job_id, fence in keys[:8]
        ]
        assert (
            len(ends.end_running(connection, failed))
            == len(ends.end_running(connection, failed))
            == 8
        )
        assert len(ends.release_running(connection, keys[8:16])) == 8
        assert len(crashes.requeue_or_fail_held(connection, keys[16:24])) == 8
        assert leases.expire_held_by(connection, worker="h", pipeline="p") == 16
    with engine.begin() as connection:
        assert sweeps.sweep_expired_leases(connection, lambda *_: "", lease_s=0.0).keys() == {
            job_id for job_id, _ in keys[24:]
        }
        assert retention.delete_old(connection, age_s=5_000.0, max_batch=100).num_deleted == 100
    assert faults(plans) == []


@pytest.mark.parametrize("act", Act)
def test_an_act_on_many_jobs_reads_neither_all_jobs_nor_all_lines(
    engine: Engine, plans: list[tuple[str, dict[str, Any]]], act: Act
) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(f"/* advisory */ {TAGS_AND_BATCHES}")
        connection.exec_driver_sql("/* advisory */ VACUUM (ANALYZE) jobs, batches, batch_lines")
    wheres = {
        "batch": JobFilter(batch=BATCH),
        "tag": JobFilter(metadata={"team": "a"}),
        "tenant": JobFilter(tenant="other"),
        "no tenant": JobFilter(tenant="none"),
        "tag of a tenant": JobFilter(tenant="default", metadata={"team": "a"}),
        "model": JobFilter(model="rare"),
        "reason": JobFilter(error_code="crashed"),
    }
    for name, where in wheres.items():
        plans.clear()
        asked = bulk_acts.bulk_act(act, where, priority=9 if act is Act.PRIORITIZE else None)
        with engine.connect() as connection:
            number = bulk_acts.count(connection, asked)
            first = bulk_acts.next_page(connection, asked, BulkProgress())
            assert first.num_changed == min(number, bulk_acts.PAGE_ROWS)
            bulk_acts.next_page(connection, asked, first)
        assert name != "batch" or number == NUM_OF_BATCH[act]
        assert all_reads(plans) == [], name


def test_the_rows_of_these_tests_have_each_terminal_state(engine: Engine) -> None:
    with engine.begin() as connection:
        assert all(some(connection, f"state = '{state}'", 1) for state in TERMINAL)
