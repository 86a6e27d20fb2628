"""The judges of tenants: each broken promise, written by hand, must be found; an honest life must
pass."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from standardwebhooks import Webhook

from tests.chaos.judge import audit
from tests.chaos.judge.tenants.bulk_acts import broken_acts
from tests.chaos.judge.tenants.families import broken_families
from tests.chaos.judge.tenants.pauses import broken_pauses
from tests.chaos.judge.tenants.quotas import QuotaTrial
from tests.chaos.judge.tenants.rows import read_rows
from tests.chaos.judge.tenants.schedules import broken_schedules
from tests.chaos.judge.tenants.tribunal import broken_tenants
from tests.chaos.judge.tenants.webhooks import broken_webhooks
from tests.chaos.load.tenants.ledger import (
    MARK,
    SPENDER,
    DeliveryHeard,
    HeardEndpoint,
    HeldPause,
    JobFamily,
    JobGroup,
    TenantLedger,
    TimedSchedule,
)
from tests.chaos.load.tenants.listener import WebhookEar

NOON = datetime(2026, 1, 2, 12, 0, tzinfo=UTC)
A, B, C = (UUID(int=number) for number in (1, 2, 3))
LIMITS = {
    "max_running": 1,
    "max_queued": 1,
    "requests_per_min": 2,
    "budget_tokens": 100,
    "budget_money": 100,
}
SETTLED = {
    "queued": 0,
    "bytes": 0,
    "open_tokens": 0,
    "open_money": Decimal(0),
    "num_reserved": 0,
    "spent_tokens": 30,
    "spent_money": Decimal("0.00013"),
}


def at(second: float) -> datetime:
    return NOON + timedelta(seconds=second)


def moves(*steps: tuple[UUID, str | None, str, float]) -> list[dict[str, Any]]:
    return [
        {"job_id": job_id, "old": old, "new": new, "at": at(second), "began_at": at(second)}
        for job_id, old, new, second in steps
    ]


LIFE = moves(
    (A, None, "queued", 0),
    (A, "queued", "running", 1),
    (B, None, "queued", 2),
    (A, "running", "succeeded", 3),
    (B, "queued", "running", 3),
    (B, "running", "queued", 4),
    (C, None, "queued", 61),
)
CROWDED = moves((A, None, "queued", 0), (B, None, "queued", 1), (A, "queued", "running", 2))
BOTH_RUN = moves((A, "queued", "running", 0), (B, "queued", "running", 1))
HURRIED = moves(
    (A, None, "queued", 0),
    (A, "queued", "cancelled", 0),
    (B, None, "queued", 1),
    (B, "queued", "cancelled", 2),
    (C, None, "queued", 59),
)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        pytest.param({}, "", id="an honest life"),
        pytest.param({"moves": BOTH_RUN}, "max_running is 1", id="two run at once"),
        pytest.param({"moves": CROWDED}, "max_queued is 1", id="two wait"),
        pytest.param({"moves": HURRIED}, "requests_per_min is 2", id="three in a minute"),
        pytest.param({"use": {**SETTLED, "open_tokens": 9}}, "open_tokens is 9", id="kept"),
        pytest.param({"use": {**SETTLED, "num_reserved": 1}}, "num_reserved is 1", id="a row"),
        pytest.param({"use": {**SETTLED, "spent_tokens": 60}}, "spent_tokens is 60", id="twice"),
        pytest.param({"use": None}, "gone", id="no quota"),
        pytest.param({"refused": [A]}, "was refused", id="a refused job is there"),
    ],
)
def test_only_a_quota_that_did_not_hold_is_found(changed: dict[str, Any], found: str) -> None:
    job = {"id": A, "finished_at": NOON, "prompt_tokens": 10, "completion_tokens": 20}
    given = {"moves": LIFE, "use": SETTLED, "refused": [], **changed}
    problems = list(QuotaTrial(limits=LIMITS, jobs=[job], **given).problems())
    assert len(problems) == bool(found), problems
    assert found in "".join(problems)


@pytest.mark.parametrize(
    ("kind", "target", "second", "num_found"),
    [
        pytest.param("tag", "held=x", 5, 1, id="while it holds"),
        pytest.param("tenant", "t", 5, 1, id="of its tenant"),
        pytest.param("tag", "held=y", 5, 0, id="another tag"),
        pytest.param("tag", "held=x", -1, 0, id="before it was acknowledged"),
        pytest.param("tag", "held=x", 11, 0, id="after the resumption was asked for"),
    ],
)
def test_only_what_begins_under_a_pause_is_found(
    kind: str, target: str, second: float, num_found: int
) -> None:
    pause = HeldPause(kind=kind, target=target, acknowledged_at=NOON, resume_asked_at=at(10))
    attempt = {
        "job_id": A, "fence": 1, "started_at": at(second), "tenant_id": "t",
        "metadata": {"held": "x"},
    }  # fmt: skip
    assert len(list(broken_pauses([pause], [attempt]))) == num_found


@pytest.mark.parametrize(
    ("seconds", "num_found"),
    [
        pytest.param((60, 121, 180.5), 0, id="each time once"),
        pytest.param((60, 119, 120, 180), 1, id="a time twice"),
        pytest.param((60, 185), 1, id="a time has none"),
        pytest.param((-61, 60, 120, 180), 1, id="before it was there"),
    ],
)
def test_only_times_with_two_jobs_or_none_are_found(
    seconds: tuple[float, ...], num_found: int
) -> None:
    schedule = TimedSchedule(name="s", acknowledged_at=at(5), stop_asked_at=at(240))
    jobs = [{"created_at": at(second), "metadata": {"schedule": "s"}} for second in seconds]
    assert len(list(broken_schedules([schedule], jobs))) == num_found


def family(**changed: Any) -> list[str]:
    """What is found of a child of two parents."""
    parent = {"finished_at": at(3), "state": changed.pop("parent", "succeeded")}
    others = changed.pop("runs_anyway", False)
    child = {
        "state": "succeeded", "finished_at": at(9), "began_at": at(4), "error": None, "fence": 1,
        "prompt_ids": [1, 2], **changed,
    }  # fmt: skip
    told = JobFamily(child=C, parents=[A, B], runs_anyway=others, prompt_ids=[1, 2])
    jobs = {A: {**parent, "state": "succeeded"}, B: parent, C: child}
    return list(broken_families([told], jobs))


FAILED = {"state": "failed", "error": {"code": "parent_failed"}, "fence": 0, "began_at": None}


@pytest.mark.parametrize(
    ("changed", "num_found"),
    [
        pytest.param({}, 0, id="after its parents"),
        pytest.param({"began_at": at(2)}, 1, id="before a parent's end"),
        pytest.param({"prompt_ids": [1]}, 1, id="without a parent's text"),
        pytest.param({"parent": "expired", **FAILED}, 0, id="failed with a parent"),
        pytest.param({"parent": "expired"}, 1, id="ran though a parent failed"),
        pytest.param({"parent": "expired", **FAILED, "fence": 1}, 1, id="began and failed"),
        pytest.param({"parent": "expired", "runs_anyway": True}, 0, id="runs without a parent"),
        pytest.param({**FAILED}, 1, id="failed though its parents succeeded"),
        pytest.param({"finished_at": None, "state": "queued"}, 1, id="never ended"),
    ],
)
def test_only_a_child_that_did_not_wait_rightly_is_found(
    changed: dict[str, Any], num_found: int
) -> None:
    assert len(family(**changed)) == num_found


def test_a_child_without_a_row_is_found() -> None:
    told = JobFamily(child=C, parents=[A], runs_anyway=False)
    assert len(list(broken_families([told], {A: {}}))) == 1


def heard(**changed: Any) -> DeliveryHeard:
    fields: dict[str, Any] = {
        "delivery": "wh_1", "event_type": "job.succeeded", "job_id": A, "is_signed": True,
        "status_code": 200, **changed,
    }  # fmt: skip
    return DeliveryHeard(**fields)


TOLD = {"object_id": A, "state": "delivered"}


@pytest.mark.parametrize(
    ("deliveries", "rows", "second", "num_found"),
    [
        pytest.param([heard()], [TOLD], 1, 0, id="told once"),
        pytest.param([heard(status_code=503), heard()], [TOLD], 1, 0, id="told again"),
        pytest.param([], [], 1, 1, id="nobody was told"),
        pytest.param([], [], -1, 0, id="it ended before there was an endpoint"),
        pytest.param([], [{**TOLD, "state": "dead"}], 1, 0, id="given up"),
        pytest.param([heard(status_code=503)], [TOLD], 1, 2, id="delivered to nobody"),
        pytest.param([heard(), heard(delivery="wh_2")], [TOLD], 1, 1, id="under two ids"),
        pytest.param([heard()], [TOLD, TOLD], 1, 1, id="two deliveries"),
        pytest.param([heard(event_type="job.failed")], [TOLD], 1, 1, id="another end"),
        pytest.param([heard(), heard(is_signed=False)], [TOLD], 1, 1, id="not signed"),
        pytest.param([heard(), heard(job_id=B)], [TOLD], 1, 1, id="another tenant's job"),
    ],
)
def test_only_ends_that_were_told_wrongly_are_found(
    deliveries: list[DeliveryHeard], rows: list[dict[str, Any]], second: float, num_found: int
) -> None:
    endpoint = HeardEndpoint(id=C, secret="", acknowledged_at=NOON)
    job = {"id": A, "state": "succeeded", "finished_at": at(second)}
    assert len(list(broken_webhooks(endpoint, deliveries, [job], rows))) == num_found


def group(num_unanswered: int = 0, told: int = 2, **changed: Any) -> list[str]:
    """What is found of two held jobs that were canceled, one of which was tried again."""
    first = {
        "id": A, "state": "cancelled", "cancel_requested_at": NOON, "priority": 7,
        "replay_of": None, **changed,
    }  # fmt: skip
    jobs = {A: first, B: {**first, "id": B, "state": "cancelled", "priority": 7}}
    for job_id, of in changed.get("replays", {C: B}).items():
        jobs[job_id] = {**first, "id": job_id, "replay_of": of}
    asked = JobGroup(
        name="g", held=[A, B], live=[], again=[B], priority=7,
        changed={"prioritize": 2, "cancel": told, "retry": 1},
        num_unanswered={"cancel": num_unanswered},
    )  # fmt: skip
    return list(broken_acts([asked], jobs))


@pytest.mark.parametrize(
    ("changed", "num_found"),
    [
        pytest.param({}, 0, id="as it was told"),
        pytest.param({"state": "succeeded"}, 1, id="one was not canceled"),
        pytest.param({"priority": 5}, 2, id="one kept its priority, and was counted"),
        pytest.param({"told": 1}, 1, id="fewer were counted"),
        pytest.param({"told": 1, "num_unanswered": 1}, 0, id="an answer was lost"),
        pytest.param({"told": 3, "num_unanswered": 1}, 1, id="more were counted"),
        pytest.param({"replays": {}}, 2, id="nothing was tried again"),
        pytest.param({"replays": {C: B, uuid4(): B}}, 2, id="tried again twice"),
    ],
)
def test_only_acts_on_many_that_did_something_else_are_found(
    changed: dict[str, Any], num_found: int
) -> None:
    assert len(group(**changed)) == num_found


@pytest.mark.parametrize(
    ("secret", "path", "statuses"),
    [
        pytest.param("whsec_YQ==", "/mine", {503, 200}, id="its own, the second time"),
        pytest.param("", "/mine", {503}, id="before the secret is known"),
        pytest.param("whsec_YQ==", "/other", {410}, id="one whose secret nobody knows"),
    ],
)
def test_an_ear_takes_only_what_is_for_its_endpoint(
    secret: str, path: str, statuses: set[int]
) -> None:
    ear = WebhookEar(path="/mine", secret=secret)
    assert {ear.hear(path, {}, b"{}") for _ in range(2)} == statuses
    assert len(ear.heard) == (2 if 200 in statuses else 0)


def test_a_signature_counts_however_old_it_is() -> None:
    ear = WebhookEar(secret="whsec_YQ==")
    headers = {
        "webhook-id": "wh_1",
        "webhook-timestamp": f"{NOON.timestamp():.0f}",
        "webhook-signature": Webhook(ear.secret).sign("wh_1", NOON, "{}"),
    }
    assert ear.is_signed(headers, b"{}")
    assert not ear.is_signed(headers, b"[]")
    assert not ear.is_signed({}, b"{}")


QUOTA = """
INSERT INTO tenants (id) VALUES (%(tenant)s);
INSERT INTO quotas (tenant_id, max_queued) VALUES (%(tenant)s, 5);
"""
JOB = """
INSERT INTO jobs (id, tenant_id, model, prompt, metadata)
VALUES (%s, %s, 'clerk', 'text', jsonb_build_object('asked_by', %s::text))
"""


@pytest.fixture
def spent(database_url: str) -> str:
    """A database with the tenant's quota, in which one job was accepted and cancelled."""
    audit.install(database_url, lease_s=1.0)
    with psycopg.connect(database_url) as connection:
        for statement in QUOTA.strip().split("\n"):
            connection.execute(statement, {"tenant": SPENDER})
        connection.execute(JOB, (A, SPENDER, MARK))
    with psycopg.connect(database_url) as connection:
        connection.execute(
            "UPDATE jobs SET state = 'cancelled', finished_at = now() WHERE id = %s", (A,)
        )
    return database_url


def test_moves_and_what_is_used_are_read_from_rows(spent: str) -> None:
    rows = read_rows(spent, None)
    assert [(row["old"], row["new"]) for row in rows.moves] == [
        (None, "queued"),
        ("queued", "cancelled"),
    ]
    assert rows.use is not None
    assert all(not value for value in rows.use.values())
    assert broken_tenants(spent, TenantLedger(promised=[A])) == []


def test_a_job_that_was_promised_and_is_not_there_is_lost(spent: str) -> None:
    found = broken_tenants(spent, TenantLedger(promised=[B]))
    assert [(finding.count, finding.job_id) for finding in found] == [("lost", B)]


def test_a_reservation_that_was_not_settled_is_found(spent: str) -> None:
    with psycopg.connect(spent) as connection:
        connection.execute("DELETE FROM quota_changes WHERE queued < 0")
    found = broken_tenants(spent, TenantLedger())
    assert {finding.count for finding in found} == {"quotas"}
