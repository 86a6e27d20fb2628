"""A tenant's own role of Postgres sees and inserts its tenant's rows alone; a producer's role needs
rights on jobs alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import Engine

from shardline.base.errors import Invalid, NotFound
from shardline.contract.ids import derived_id
from shardline.store.tenants import quotas
from shardline.store.tenants.tenant_roles import (
    GRANTS,
    TenantRole,
    grant_role,
    list_roles,
    revoke_role,
)
from tests.integration.migrations.test_migrations import alembic
from tests.integration.rows import change, claim, database_with_head, end, submit, success

INSERT = "INSERT INTO jobs (model, prompt) VALUES ('m', 'text') RETURNING id"
CHILD = "INSERT INTO jobs (model, prompt, depends_on) VALUES ('m', 'x', %s) RETURNING id"
PATIENT = "INSERT INTO jobs (model, prompt, retry) VALUES ('m', 'x', %s) RETURNING id"
INSERT_WITH_ID = "INSERT INTO jobs (id, model, prompt) VALUES (%s, 'm', 'text') RETURNING id"
INSERT_AS = "INSERT INTO jobs (model, prompt, tenant_id) VALUES ('m', 'text', %s) RETURNING id"


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    with database_with_head(database_url) as engine:
        yield engine


@pytest.fixture
def role(engine: Engine) -> Iterator[str]:
    """A role without rights; roles belong to the server, not to the database."""
    with new_role(engine) as name:
        yield name


@contextmanager
def new_role(engine: Engine) -> Iterator[str]:
    name = f"app {uuid4()}"
    with engine.begin() as connection:
        connection.exec_driver_sql(f'CREATE ROLE "{name}" LOGIN')
    yield name
    with engine.begin() as connection:
        connection.exec_driver_sql(f'DROP OWNED BY "{name}"')
        connection.exec_driver_sql(f'DROP ROLE "{name}"')


@contextmanager
def acting(database_url: str, role: str) -> Iterator[psycopg.Connection]:
    """A connection that the role made itself, so that nothing gives it back another's rights."""
    with psycopg.connect(database_url, user=role, autocommit=True) as connection:
        yield connection


def insert(connection: psycopg.Connection, statement: str = INSERT, *values: str) -> UUID:
    row = connection.execute(statement, values).fetchone()
    assert row is not None
    return UUID(str(row[0]))


def seen(connection: psycopg.Connection, relation: str = "jobs") -> int:
    """How many rows there are for this connection."""
    query = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(relation))
    row = connection.execute(query).fetchone()
    assert row is not None
    return int(row[0])


def grant(engine: Engine, tenant: str, role: str) -> None:
    with engine.begin() as connection:
        grant_role(connection, tenant, role)


def test_a_producers_role_needs_rights_on_jobs_alone(
    engine: Engine, database_url: str, role: str
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(f'GRANT INSERT, SELECT ON jobs TO "{role}"')
        quotas.set_quota(connection, "default", {"max_queued": 2})
    with acting(database_url, role) as connection:
        insert(connection)
        insert(connection, INSERT_AS, "default")
        with pytest.raises(psycopg.errors.ConfigurationLimitExceeded):
            insert(connection)
        assert seen(connection) == 2


def test_a_tenants_role_sees_and_inserts_its_own_rows_alone(
    engine: Engine, database_url: str, role: str
) -> None:
    grant(engine, "acme", role)
    with engine.begin() as connection:
        quotas.add_tenant(connection, "other")
    with psycopg.connect(database_url, autocommit=True) as owner:
        others = insert(owner, INSERT_AS, "other")
        with acting(database_url, role) as connection:
            mine = insert(connection)
            assert insert(connection, INSERT_AS, "acme")
            assert insert(connection, CHILD, json.dumps([{"job": str(mine)}]))
            assert insert(connection, PATIENT, json.dumps({"max_attempts": 2}))
            with pytest.raises(psycopg.errors.ForeignKeyViolation, match="has no job"):
                insert(connection, CHILD, json.dumps([{"job": str(others)}]))
            for tenant in ("other", "default"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    insert(connection, INSERT_AS, tenant)
            assert (seen(connection), seen(owner)) == (4, 5)
            cancel = "UPDATE jobs SET cancel_requested_at = now() WHERE id = %s"
            assert connection.execute(cancel, (others,)).rowcount == 0
            assert connection.execute(cancel, (mine,)).rowcount == 1
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="tenant_roles"):
                connection.execute("UPDATE tenant_roles SET tenant_id = 'other'")


def test_a_tenants_role_names_no_id_that_follows_from_anothers_name(
    engine: Engine, database_url: str, role: str
) -> None:
    grant(engine, "acme", role)
    mine = derived_id("a task of acme")
    submit(engine, id=mine, tenant="acme")
    with acting(database_url, role) as connection:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="no_ids_of_version_8"):
            insert(connection, INSERT_WITH_ID, str(derived_id("a task of another")))
        assert insert(connection, INSERT_WITH_ID, str(uuid4()))
        cancel = "UPDATE jobs SET cancel_requested_at = now() WHERE id = %s"
        assert connection.execute(cancel, (mine,)).rowcount == 1


def test_a_role_of_before_the_migration_may_say_how_failures_are_tried_again(
    engine: Engine, database_url: str, role: str
) -> None:
    alembic(database_url, "downgrade", "0032")
    with engine.begin() as connection:
        quotas.add_tenant(connection, "acme")
        connection.exec_driver_sql(f'GRANT INSERT (model, prompt), SELECT ON jobs TO "{role}"')
    bound = "INSERT INTO tenant_roles (role_name, tenant_id) VALUES (:role, 'acme')"
    change(engine, bound, role=role)
    alembic(database_url, "upgrade", "head")
    with acting(database_url, role) as connection:
        assert insert(connection, PATIENT, json.dumps({"max_attempts": 2}))


def test_results_and_decisions_are_the_tenants_own(
    engine: Engine, database_url: str, role: str
) -> None:
    grant(engine, "acme", role)
    ids = [*submit(engine, tenant="acme"), *submit(engine)]
    end(engine, *(success(one) for one in claim(engine, ids)))
    change(engine, 'UPDATE jobs SET params = \'{"question": {"name": "late"}}\'')
    with acting(database_url, role) as connection:
        assert {name: seen(connection, name) for name in ("results", "decisions")} == {
            "results": 1,
            "decisions": 1,
        }


def test_no_table_or_function_of_a_roles_own_reaches_what_triggers_write(
    engine: Engine, database_url: str, role: str
) -> None:
    grant(engine, "acme", role)
    with engine.begin() as connection:
        quotas.set_quota(connection, "acme", {"max_queued": 1})
    with acting(database_url, role) as connection:
        insert(connection)
        connection.execute("CREATE TEMP TABLE quotas (LIKE jobs)")
        with pytest.raises(psycopg.errors.ConfigurationLimitExceeded):
            insert(connection)
        connection.execute("CREATE TEMP TABLE mine (LIKE jobs)")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(
                "CREATE TRIGGER t AFTER DELETE ON mine FOR EACH ROW"
                " EXECUTE FUNCTION shardline_move_job()"
            )


def test_a_role_that_acts_as_another_keeps_its_tenant(
    engine: Engine, database_url: str, role: str
) -> None:
    grant(engine, "acme", role)
    with new_role(engine) as reader:
        with engine.begin() as connection:
            connection.exec_driver_sql(f'GRANT SELECT ON jobs TO "{reader}"')
            connection.exec_driver_sql(f'GRANT "{reader}" TO "{role}"')
        with psycopg.connect(database_url, autocommit=True) as owner:
            insert(owner)
        with acting(database_url, role) as connection:
            connection.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(reader)))
            assert seen(connection) == 0


def test_a_revoked_role_has_no_rights(engine: Engine, database_url: str, role: str) -> None:
    grant(engine, "acme", role)
    with engine.begin() as connection:
        assert list_roles(connection) == [TenantRole(role=role, tenant="acme")]
        revoke_role(connection, role)
        assert list_roles(connection) == []
    with acting(database_url, role) as connection:
        for statement in (INSERT, "SELECT FROM jobs", "SELECT FROM results"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement)
    with engine.begin() as connection, pytest.raises(NotFound, match="no tenant"):
        revoke_role(connection, role)


def test_a_role_that_no_policy_holds_is_refused(engine: Engine, database_url: str) -> None:
    owner = psycopg.conninfo.conninfo_to_dict(database_url)["user"]
    with engine.begin() as connection, pytest.raises(Invalid, match="superuser"):
        grant_role(connection, "acme", str(owner))
    with engine.begin() as connection, pytest.raises(NotFound, match="CREATE ROLE"):
        grant_role(connection, "acme", "nobody")


def test_grants_name_what_a_producer_may_say() -> None:
    assert not [name for name in ("state", "fence", "key_name", "choice_of") if name in GRANTS[0]]
