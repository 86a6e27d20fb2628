"""The audit log on a real Postgres: what is done is noted in the same transaction, without secrets,
by whoever may do it."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import Connection, Engine, text

from shardline.base.errors import Invalid
from shardline.contract.api_key import Scope
from shardline.contract.job_filter import JobFilter
from shardline.contract.schedules.schedule_tables import PauseKind
from shardline.contract.webhooks.targets import WebhookReach
from shardline.store import api_keys, audit, bulk_acts
from shardline.store.api_keys import Grant
from shardline.store.audit import AuditEntry, AuditQuery
from shardline.store.bulk_acts import Act, BulkProgress, bulk_act
from shardline.store.schedules import pauses, schedule_rows
from shardline.store.schedules.schedule_rows import NewSchedule
from shardline.store.tenants import quotas, tenant_roles
from shardline.store.webhooks import endpoints
from shardline.store.webhooks.endpoints import EndpointChange, NewEndpoint
from tests.integration.rows import MODEL, cell, change, model_row, submit
from tests.integration.store.test_tenant_roles import new_role

REACH = WebhookReach()
TOKEN = "a-token-that-nobody-may-see"
PROMPT = "a prompt that nobody may see"


def listed(engine: Engine, **asked: Any) -> list[AuditEntry]:
    """The oldest first, without what the test's database began with."""
    with engine.begin() as connection:
        found, _ = audit.list_acts(connection, AuditQuery(**asked), limit=audit.MAX_LISTED)
    return found[::-1]


def begun(engine: Engine) -> Engine:
    """Forgets what was done before the test."""
    change(engine, "DELETE FROM audit")
    return engine


def told(entry: AuditEntry) -> tuple[str, str, str, str | None]:
    return entry.act, entry.object_kind, entry.object_id, entry.tenant


def test_keys_are_noted_without_a_hash_as_they_come_change_and_end(engine: Engine) -> None:
    begun(engine)
    with engine.begin() as connection:
        key = api_keys.create(connection, Grant(name="web", tenant="acme"))
        api_keys.rotate(connection, "web", grace_s=60.0)
        api_keys.revoke(connection, "web")
        connection.execute(text("UPDATE api_keys SET scopes = '{read}', last_used_at = now()"))
        connection.execute(text("UPDATE api_keys SET last_used_at = now()"))
    found = [entry for entry in listed(engine) if entry.object_kind == "key"]
    assert [entry.act for entry in found] == [
        *("create", "rotate", "create", "revoke", "revoke", "change", "change"),
    ]
    first, rotated = found[:2]
    assert (first.tenant, first.change["name"]) == ("acme", "web")
    assert first.change["scopes"] == [str(scope) for scope in Scope]
    assert rotated.object_id == first.object_id
    assert set(rotated.change) == {"replaced_at", "expires_at"}
    assert found[-1].change["scopes"]["to"] == ["read"]
    everything = str(found)
    assert key.partition(f"{first.object_id}-")[2] not in everything
    assert cell(engine, "SELECT encode(digest, 'hex') FROM api_keys LIMIT 1") not in everything


def test_limits_prices_weights_and_roles_are_noted_with_old_and_new_values(
    engine: Engine,
) -> None:
    begun(engine)
    with new_role(engine) as role:
        with engine.begin() as connection:
            quotas.set_quota(connection, "acme", {"max_queued": 7})
            quotas.set_quota(connection, "acme", {"max_queued": 7}, key_name="web")
            quotas.set_quota(connection, "acme", {"max_queued": 9})
            quotas.set_weight(connection, "acme", 2.5)
            quotas.set_price(connection, MODEL, Decimal("0.25"), Decimal(1))
            quotas.set_price(connection, MODEL, Decimal("0.25"), Decimal(1))
            quotas.remove_quota(connection, "acme")
            tenant_roles.grant_role(connection, "acme", role)
            tenant_roles.revoke_role(connection, role)
        found = listed(engine)
    assert [told(entry) for entry in found] == [
        ("create", "tenant", "acme", "acme"),
        ("create", "quota", "acme", "acme"),
        ("create", "quota", "acme web", "acme"),
        ("change", "quota", "acme", "acme"),
        ("change", "tenant", "acme", "acme"),
        ("create", "price", MODEL, None),
        ("delete", "quota", "acme", "acme"),
        ("grant", "role", role, "acme"),
        ("revoke", "role", role, "acme"),
    ]
    assert found[3].change == {"max_queued": {"from": 7, "to": 9}}
    assert found[4].change == {"weight": {"from": 1, "to": 2.5}}


def test_pauses_and_schedules_are_noted_without_their_requests(engine: Engine) -> None:
    begun(engine)
    new = NewSchedule(name="daily", cron="0 7 * * *", request={"model": MODEL, "prompt": PROMPT})
    with engine.begin() as connection:
        pauses.pause(connection, PauseKind.TENANT, "acme", reason="unpaid")
        pauses.pause(connection, PauseKind.TENANT, "acme", reason="still unpaid")
        pauses.resume(connection, PauseKind.TENANT, "acme")
        made = schedule_rows.create(connection, new)
        schedule_rows.set_paused(connection, made.id, paused=True, tenant=None)
        schedule_rows.set_paused(connection, made.id, paused=False, tenant=None)
        # As relays write it: no act.
        connection.execute(text("UPDATE schedules SET last_at = now(), next_at = now()"))
        connection.execute(
            text("UPDATE schedules SET request = CAST(:request AS json)"),
            {"request": r'{"prompt": "\u0000"}'},
        )
        schedule_rows.delete(connection, made.id, tenant=None)
    found = listed(engine)
    assert [(entry.act, entry.object_kind) for entry in found] == [
        *(("pause", "pause"), ("change", "pause"), ("resume", "pause")),
        *(("create", "schedule"), ("pause", "schedule"), ("resume", "schedule")),
        *(("change", "schedule"), ("delete", "schedule")),
    ]
    assert found[1].change == {"reason": {"from": "unpaid", "to": "still unpaid"}}
    assert found[-2].change == {"request": "changed"}
    assert found[3].object_id == str(made.id)
    assert PROMPT not in str(found)


def test_webhook_endpoints_are_noted_without_secrets_and_urls(engine: Engine) -> None:
    begun(engine)
    url = f"https://example.org/{TOKEN}"
    new = NewEndpoint(url=url, name="hooks", event_types=["job.*"])
    wanted = EndpointChange(url=f"{url}/2", enabled=False)
    with engine.begin() as connection:
        made = endpoints.create(connection, new, reach=REACH)
        endpoint_id = made.endpoint.id
        endpoints.change(connection, endpoint_id, wanted, tenant=None, reach=REACH)
        rotated = endpoints.rotate(connection, endpoint_id, grace_s=60.0, tenant=None)
        endpoints.delete(connection, endpoint_id, tenant=None)
    found = listed(engine)
    acts = ["create", "change", "rotate", "delete"]
    assert [told(entry) for entry in found] == [
        (act, "webhook endpoint", str(endpoint_id), "default") for act in acts
    ]
    assert (found[1].change["url"], found[2].change) == ("changed", {"secret": "changed"})
    for secret in (made.secret, rotated.secret):
        assert secret.partition("_")[2] not in str(found)
    assert TOKEN not in str(found)


def test_a_model_that_a_head_registers_again_is_no_act(engine: Engine) -> None:
    begun(engine)
    from_head = model_row(MODEL)
    change(engine, "UPDATE models SET updated_at = now(), tokenizer = '{}'")
    assert listed(engine) == []
    change(engine, "UPDATE models SET fingerprint = 'other'")
    (noted,) = listed(engine)
    assert noted.change == {"fingerprint": {"from": from_head["fingerprint"], "to": "other"}}


@pytest.mark.parametrize("size", [1_000, 2], ids=["one page", "three pages"])
def test_an_act_on_many_jobs_is_one_row_with_filter_and_count(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    begun(engine)
    monkeypatch.setattr(bulk_acts, "PAGE_ROWS", size)
    submit(engine, num=5)
    act = bulk_act(Act.PRIORITIZE, JobFilter(model=MODEL), priority=1)
    progress = BulkProgress()
    while progress.has_more:
        with engine.begin() as connection:
            audit.act_as(connection, "cli ada")
            progress = bulk_acts.next_page(connection, act, progress)
    (noted,) = listed(engine)
    assert (noted.act, noted.object_kind, noted.actor) == ("prioritize", "jobs", "cli ada")
    assert noted.change == {"jobs": 5, "asked": {"model": MODEL, "priority": 1}}
    with engine.begin() as connection:
        bulk_acts.next_page(connection, act, BulkProgress())
    assert len(listed(engine)) == 1


def test_what_is_rolled_back_is_not_noted_and_an_actor_ends_with_its_transaction(
    engine: Engine,
) -> None:
    begun(engine)

    def pause(connection: Connection) -> None:
        pauses.pause(connection, PauseKind.MODEL, MODEL)

    with engine.connect() as connection:
        with connection.begin() as lost:
            audit.acting("key one", pause)(connection)
            lost.rollback()
        with connection.begin():
            audit.acting("key two", pause)(connection)
        with connection.begin():
            pauses.resume(connection, PauseKind.MODEL, MODEL)
    role = cell(engine, "SELECT session_user::text")
    assert [(entry.actor, entry.role) for entry in listed(engine)] == [
        *(("key two", role), (f"role {role}", role)),
    ]


def test_a_role_that_may_act_needs_no_right_on_the_log(engine: Engine, database_url: str) -> None:
    begun(engine)
    with new_role(engine) as role:
        rights = sql.SQL("GRANT SELECT, INSERT, DELETE ON pauses TO {}")
        granted = rights.format(sql.Identifier(role)).as_string()
        with engine.begin() as connection:
            connection.exec_driver_sql(granted)
        with psycopg.connect(database_url, user=role, autocommit=True) as theirs:
            theirs.execute("INSERT INTO pauses (kind, target) VALUES ('tenant', 'acme')")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                theirs.execute("DELETE FROM audit")
        (noted,) = listed(engine)
        assert (noted.actor, noted.role) == (f"role {role}", role)


def test_a_tenants_role_notes_acts_on_jobs_as_its_tenants_alone(
    engine: Engine, database_url: str
) -> None:
    note = sql.SQL("SELECT shardline_audit_jobs({known}, {act}, 'other', '{{}}', 3)")
    with new_role(engine) as role:
        with engine.begin() as connection:
            tenant_roles.grant_role(connection, "acme", role)
        begun(engine)
        with engine.begin() as connection:
            pauses.pause(connection, PauseKind.MODEL, MODEL)
        (pause,) = listed(engine)
        with psycopg.connect(database_url, user=role, autocommit=True) as theirs:
            # Neither another's row nor another kind of act.
            theirs.execute(note.format(known=sql.Literal(pause.id), act=sql.Literal("cancel")))
            with pytest.raises(psycopg.errors.RaiseException):
                theirs.execute(note.format(known=sql.Literal(None), act=sql.Literal("grant")))
        kept, noted = listed(engine)
    assert kept == pause
    assert (noted.role, noted.tenant, noted.object_kind) == (role, "acme", "jobs")


def test_pages_and_filters_of_acts(engine: Engine) -> None:
    begun(engine)
    for place in range(5):
        with engine.begin() as connection:
            audit.act_as(connection, f"cli {place % 2}")
            pauses.pause(connection, PauseKind.TAG, f"a={place}")
    with engine.begin() as connection:
        first, has_more = audit.list_acts(connection, AuditQuery(), limit=3)
        after = AuditQuery(after=first[-1].id)
        rest, is_more = audit.list_acts(connection, after, limit=3)
    assert [entry.object_id for entry in (*first, *rest)] == [
        f"tag a={place}" for place in (4, 3, 2, 1, 0)
    ]
    assert (has_more, is_more) == (True, False)
    assert len(listed(engine, actor="cli 1")) == 2
    assert len(listed(engine, act="resume")) == 0
    assert len(listed(engine, since=first[1].at)) == 2
    with engine.begin() as connection, pytest.raises(Invalid, match="after"):
        audit.list_acts(connection, AuditQuery(after=10**12), limit=3)


def test_old_acts_are_deleted(engine: Engine) -> None:
    begun(engine)
    with engine.begin() as connection:
        for target in ("a", "b"):
            pauses.pause(connection, PauseKind.TENANT, target)
    change(
        engine,
        "UPDATE audit SET at = now() - interval '2 days' WHERE object_id = 'tenant a'",
    )
    with engine.begin() as connection:
        assert audit.delete_old(connection, age_s=86_400.0) == 1
    (left,) = listed(engine)
    assert left.object_id == "tenant b"
