"""Energy, money and carbon in SQL: rates by time, the view `job_costs`, and reports that stay
within their limits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from shardline.store.statistics import costs
from shardline.store.statistics.costs import Cost, EpochEnergy
from shardline_server.store import ends, leases
from shardline_server.store.leases import Beat
from tests.integration.rows import LONG_S, MODEL, cell, change, claim, end, release, submit, success

KWH_J = 3.6e6
NOW = datetime.now(UTC)


@pytest.fixture
def engine(engine: Engine) -> Engine:
    """With a pipeline whose device has taken a third of a kWh for each row."""
    measure(engine, kwh=4.0, num_rows=12)
    return engine


def measure(engine: Engine, **fields: Any) -> None:
    """What the devices of the head's pipeline have taken in an epoch."""
    fields["energy_j"] = fields.pop("kwh") * KWH_J
    energy = EpochEnergy(**{"pipeline": "p", "epoch": 1, "source": "rapl", **fields})
    with engine.begin() as connection:
        costs.put_epoch_energy(connection, energy)


def done(engine: Engine, kwh: int, **fields: Any) -> UUID:
    """A job that has ended and took so much: three rows for each, two of them of its prompt."""
    (claimed,) = claim(engine, submit(engine, **fields))
    assert end(engine, success(claimed, *[7] * (3 * kwh - 1)))
    return claimed.job_id


def move(engine: Engine, job_id: UUID, fence: int, epoch: int) -> None:
    """An attempt was made in another epoch."""
    moved = "UPDATE attempts SET epoch = :epoch WHERE job_id = :id AND fence = :fence"
    change(engine, moved, id=job_id, fence=fence, epoch=epoch)


def put(engine: Engine, kind: costs.RateKind, rates: dict[datetime, float]) -> int:
    with engine.begin() as connection:
        return costs.put_series(connection, kind, rates)


def report(engine: Engine, *by: str, **asked: Any) -> list[Cost]:
    with engine.begin() as connection:
        return costs.costs(connection, num_days=7, by=by, **asked)


def priced(engine: Engine, job_id: UUID) -> tuple[Any, ...]:
    with engine.begin() as connection:
        query = (
            "SELECT kwh, cost, carbon_g, energy_source, num_attempts, num_unknown"
            " FROM job_costs WHERE job_id = :id"
        )
        return tuple(connection.execute(text(query), {"id": job_id}).one())


def test_a_job_costs_its_energy_at_the_rates_of_its_end(engine: Engine) -> None:
    put(
        engine,
        "price",
        {
            NOW - timedelta(hours=2): 0.1,
            NOW - timedelta(hours=1): 0.5,
            NOW + timedelta(hours=1): 9.0,
        },
    )
    put(engine, "carbon", {NOW - timedelta(hours=1): 400.0})

    job_id = done(engine, 2)

    assert priced(engine, job_id) == (2.0, 1.0, 800.0, "rapl", 1, 0)


def test_rates_that_come_late_or_are_mended_count_for_the_past(engine: Engine) -> None:
    job_id = done(engine, 1)
    assert priced(engine, job_id)[:3] == (1.0, None, None)

    assert put(engine, "price", {NOW - timedelta(hours=1): 0.3}) == 1
    assert priced(engine, job_id)[1] == pytest.approx(0.3)
    assert put(engine, "price", {NOW - timedelta(hours=1): 0.2}) == 1
    assert put(engine, "price", {NOW - timedelta(hours=1): 0.2}) == 0, "nothing has changed"
    assert priced(engine, job_id)[1] == pytest.approx(0.2)


def test_attempts_count_with_the_mean_of_their_epochs_by_what_they_saved(engine: Engine) -> None:
    (first,) = claim(engine, submit(engine))
    assert priced(engine, first.job_id) == (None, None, None, "rapl", 1, 1), "not known yet"
    with engine.begin() as connection:
        beat = Beat(job_id=first.job_id, fence=first.fence, start=0, ids=(7, 8))
        leases.heartbeat(connection, [beat], lease_s=LONG_S)
        ends.release_running(connection, [(first.job_id, first.fence)])
    (second,) = claim(engine, [first.job_id])
    release(engine, second)
    assert priced(engine, first.job_id)[:1] == (1.0,), "no token, no rows"
    (third,) = claim(engine, [first.job_id])
    measure(engine, kwh=5.0, num_rows=10, epoch=2, source="table")
    move(engine, first.job_id, third.fence, epoch=2)
    end(engine, success(third, 7, 8, 9))

    assert priced(engine, first.job_id) == (1.0 + 2.0, None, None, "rapl+table", 3, 0)


def test_the_mean_of_an_epoch_follows_what_its_head_writes(engine: Engine) -> None:
    job_id = done(engine, 2)
    measure(engine, kwh=6.0, num_rows=12)
    assert priced(engine, job_id)[0] == 3.0


def test_cached_tokens_of_a_prompt_take_nothing(engine: Engine) -> None:
    job_id = done(engine, 1)
    change(engine, "UPDATE results SET cached_tokens = 1")
    assert priced(engine, job_id)[0] == pytest.approx(2 / 3)


def test_attempts_of_earlier_releases_keep_their_figures(engine: Engine) -> None:
    job_id = done(engine, 1)
    change(engine, "UPDATE attempts SET energy_j = 5 * 3.6e6, energy_source = 'nvml'")
    assert priced(engine, job_id) == (5.0, None, None, "nvml", 1, 0)


def test_a_report_sums_by_model_tenant_and_day_and_says_what_is_unknown(engine: Engine) -> None:
    change(engine, "INSERT INTO tenants (id) VALUES ('other')")
    put(engine, "price", {NOW - timedelta(days=9): 0.25})
    for kwh in (1, 3):
        done(engine, kwh)
    done(engine, 1, tenant="other")
    move(engine, done(engine, 1), fence=1, epoch=9)

    (whole,) = report(engine)
    assert (whole.day, whole.model, whole.tenant) == (None, None, None)
    assert (whole.num_jobs, whole.num_unknown, whole.completion_tokens) == (4, 1, 2 + 8 + 2 + 2)
    assert (whole.kwh, whole.cost, whole.carbon_g, whole.sources) == (5.0, 1.25, None, ["rapl"])
    rows = report(engine, "model", "tenant", "day")
    assert [(row.model, row.tenant, row.kwh) for row in rows] == [
        (MODEL, "default", 4.0),
        (MODEL, "other", 1.0),
    ]
    assert [row.tenant for row in report(engine, "tenant", tenant="other")] == ["other"]
    assert report(engine, model="none") == []


def test_a_report_counts_the_newest_jobs_of_its_window_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "MAX_JOBS", 2)
    old = done(engine, 1)
    change(engine, "UPDATE jobs SET created_at = now() - interval '8 days' WHERE id = :id", id=old)
    for kwh in (10, 1, 2):
        done(engine, kwh)

    (row,) = report(engine)

    assert (row.num_jobs, row.kwh) == (2, 3.0)


def test_a_job_that_never_ran_took_nothing_and_is_not_unknown(engine: Engine) -> None:
    submit(engine)

    (row,) = report(engine)

    assert (row.num_jobs, row.num_unknown, row.kwh) == (1, 0, None)


def test_a_fixed_rate_holds_for_the_past_and_a_new_one_from_now_on(engine: Engine) -> None:
    job_id = done(engine, 1)
    with engine.begin() as connection:
        assert [costs.put_fixed(connection, "price", rate) for rate in (0.3, 0.3)] == [1, 0]
    with engine.begin() as connection:
        assert costs.put_fixed(connection, "price", 0.4) == 1
        assert costs.present_rates(connection) == {"price": 0.4}

    assert priced(engine, job_id)[1] == pytest.approx(0.3)
    assert priced(engine, done(engine, 1))[1] == pytest.approx(0.4)


def due_in_h(engine: Engine, **fields: Any) -> float:
    """After how many hours a job of now may begin."""
    (job_id,) = submit(engine, **fields)
    query = (
        "SELECT extract(epoch FROM not_before - created_at)::float8 / 3600 FROM jobs WHERE id = :id"
    )
    return float(cell(engine, query, id=job_id))


@pytest.mark.parametrize(
    ("fields", "due_h"),
    [
        ({"deadline_s": 8 * 3600}, 0.0),
        ({"flexible": "price", "deadline_s": 8 * 3600}, 3.0),
        ({"flexible": "price", "deadline_s": 3 * 3600}, 2.0),
        ({"flexible": "price", "deadline_s": 60}, 0.0),
        ({"flexible": "price", "deadline_s": 8 * 3600, "delay_s": 3.5 * 3600}, 3.5),
        ({"flexible": "price", "deadline_s": 8 * 3600, "delay_s": 4.5 * 3600}, 5.0),
        ({"flexible": "price", "deadline_s": 3600, "delay_s": 2 * 3600}, 2.0),
        ({"flexible": "carbon", "deadline_s": 8 * 3600, "delay_s": 1800}, 0.5),
    ],
    ids=[
        "inflexible",
        "lowest",
        "near deadline",
        "now",
        "within it",
        "next lowest",
        "too late",
        "no rate known",
    ],
)
def test_a_flexible_job_begins_with_the_lowest_rate_before_its_deadline(
    engine: Engine, fields: dict[str, Any], due_h: float
) -> None:
    hours = {
        -9.0: 0.0,
        -1.0: 0.3,
        1.0: 0.4,
        2.0: 0.2,
        3.0: 0.1,
        4.0: 0.5,
        5.0: 0.15,
        6.0: 0.15,
        7.9: 0.01,
    }
    put(
        engine,
        "price",
        {datetime.now(UTC) + timedelta(hours=at): rate for at, rate in hours.items()},
    )

    assert due_in_h(engine, **fields) == pytest.approx(due_h, abs=0.01)


def test_a_report_of_many_jobs_reads_them_by_index(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL enable_seqscan = off"))
        plan = "\n".join(
            connection.scalars(
                text(f"EXPLAIN {costs.COSTS.text}"),
                {
                    "num_days": 7,
                    "by": ["day"],
                    "model": None,
                    "tenant": None,
                    "max_jobs": 9,
                    "max_groups": 9,
                },
            )
        )
    assert "jobs_listing" in plan
    assert "attempts_pkey" in plan
    assert cell(engine, "SELECT count(*) FROM energy_rates") == 0
