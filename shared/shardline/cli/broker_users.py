"""`shardline tenant grant-broker | revoke-broker | brokers`: users of Redis of a tenant.

Who may run it may change users of Redis, or gives what it prints to somebody who may.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from redis.exceptions import RedisError, ResponseError

from shardline.base.config import Settings
from shardline.base.errors import Conflict, Unavailable
from shardline.base.redis import redis_client
from shardline.cli import show
from shardline.cli.arguments import Json
from shardline.cli.database import transaction
from shardline.contract.tenants.tenant_door import TenantDoor
from shardline.store.tenants import tenant_doors
from shardline.store.tenants.tenant_doors import BrokerUser

TIMEOUT_S = 5.0

User = Annotated[str, typer.Argument(help="A user of Redis, for this tenant alone.")]
Print = Annotated[
    bool, typer.Option("--print", help="Print the command for Redis instead of running it.")
]


def grant_broker(
    name: Annotated[str, typer.Argument(help="The tenant; made if there is none.")],
    user: User,
    only_print: Print = False,
) -> None:
    """Make a user of Redis that submits as a tenant; again: another password."""
    password = secrets.token_urlsafe(24)
    digest = hashlib.sha256(password.encode()).hexdigest()
    with transaction() as connection:
        is_new = tenant_doors.grant_user(connection, name, user)
        command = ("ACL", "SETUSER", user, *TenantDoor.of(name).rules(f"#{digest}"))
        if only_print:
            _print(command)
        else:
            with _redis() as redis:
                if is_new and user in redis.acl_users():
                    raise Conflict(f"Redis has a user {user} already; name another")
                redis.execute_command(*command)
                _save(redis)
    door = TenantDoor.of(name)
    show.as_json(
        {
            "user": user,
            "password": password,
            "queue": door.tasks,
            "stream": door.requests,
            "result_backend_transport_options": {"global_keyprefix": door.results},
        }
    )


def revoke_broker(user: User, only_print: Print = False) -> None:
    """Delete a tenant's user of Redis."""
    with transaction() as connection:
        tenant_doors.revoke_user(connection, user)
        command = ("ACL", "DELUSER", user)
        if only_print:
            _print(command)
        else:
            with _redis() as redis:
                redis.execute_command(*command)
                _save(redis)
    typer.echo(f"{user} has no rights")


def list_brokers(json: Json = False) -> None:
    """List users of Redis with their tenants."""
    with transaction() as connection:
        found = tenant_doors.list_users(connection)
    show.each(found, json=json, table=_table)


def _table(rows: Iterable[BrokerUser]) -> None:
    table = show.new_table("user", "tenant")
    for row in rows:
        table.add_row(row.user, row.tenant)
    show.print_table(table)


def _print(command: tuple[str, ...]) -> None:
    typer.echo(" ".join(f"'{word}'" if " " in word or "#" in word else word for word in command))


@contextmanager
def _redis() -> Iterator[Any]:
    """The Redis of SHARDLINE_REDIS_URL. Raises Unavailable for any of its errors."""
    with redis_client(Settings().redis_url, timeout_s=TIMEOUT_S) as redis:
        try:
            yield redis
        except RedisError as error:
            raise Unavailable("Redis did not change the user; see --print", str(error)) from error


def _save(redis: Any) -> None:
    """A server without a file of users forgets them when it ends: see docs/tenants.md."""
    with suppress(ResponseError):
        redis.acl_save()
