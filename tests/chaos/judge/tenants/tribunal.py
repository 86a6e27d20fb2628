"""The judges of tenants, one after the other: what must hold of quotas, pauses, schedules,
families, webhooks and acts on many when all has ended. Knows no server but Postgres."""

from __future__ import annotations

from collections.abc import Iterator

from tests.chaos.judge.tenants.bulk_acts import broken_acts
from tests.chaos.judge.tenants.families import broken_families
from tests.chaos.judge.tenants.pauses import broken_pauses
from tests.chaos.judge.tenants.quotas import QuotaTrial
from tests.chaos.judge.tenants.rows import TenantRows, read_rows
from tests.chaos.judge.tenants.schedules import broken_schedules
from tests.chaos.judge.tenants.webhooks import broken_webhooks
from tests.chaos.load.tenants.ledger import LIMITS, SPENDER, TEAM, TenantLedger
from tests.chaos.report.finding import Finding


def broken_tenants(database_url: str, ledger: TenantLedger) -> list[Finding]:
    """I14: every promise to a tenant that was not kept."""
    endpoint_id = None if ledger.endpoint is None else ledger.endpoint.id
    rows = read_rows(database_url, endpoint_id)
    found = [
        Finding(invariant="I14", count=count, what=what)
        for count, problems in _judged(ledger, rows)
        for what in problems
    ]
    lost = [job_id for job_id in ledger.promised if job_id not in rows.jobs]
    return [
        *found,
        *(
            Finding(invariant="I1", count="lost", what="a tenant was promised it", job_id=job_id)
            for job_id in lost
        ),
    ]


def _judged(ledger: TenantLedger, rows: TenantRows) -> Iterator[tuple[str, Iterator[str]]]:
    """Yields fields of the report, each with what is wrong."""
    jobs = list(rows.jobs.values())
    if rows.use is not None or rows.moves:
        trial = QuotaTrial(
            limits=LIMITS,
            jobs=[job for job in jobs if job["tenant_id"] == SPENDER],
            moves=rows.moves,
            use=rows.use,
            refused=ledger.refused,
        )
        yield "quotas", trial.problems()
    yield "pauses", broken_pauses(ledger.pauses, rows.attempts)
    yield "schedules", broken_schedules(ledger.schedules, jobs)
    yield "families", broken_families(ledger.families, rows.jobs)
    yield "bulk_acts", broken_acts(ledger.groups, rows.jobs)
    if ledger.endpoint is not None:
        team = [job for job in jobs if job["tenant_id"] == TEAM]
        yield (
            "webhooks",
            broken_webhooks(ledger.endpoint, ledger.deliveries, team, rows.deliveries),
        )
