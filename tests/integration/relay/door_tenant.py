"""A tenant with a user of Redis: its own Celery app and client, as its programs have them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from celery import Celery
from redis import Redis
from typer.testing import CliRunner

from shardline.cli.commands import cli
from shardline.contract.tenants.tenant_door import TenantDoor


def shardline(database_url: str, redis_url: str, *arguments: str) -> str:
    """What the command says."""
    environment = {"SHARDLINE_DATABASE_URL": database_url, "SHARDLINE_REDIS_URL": redis_url}
    result = CliRunner().invoke(cli, ["tenant", *arguments], env=environment)
    if result.exit_code:
        raise AssertionError(result.output) from result.exception
    return result.stdout


@dataclass(kw_only=True)
class DoorTenant:
    """`url` is Redis, as its user."""

    door: TenantDoor
    user: str
    url: str
    app: Celery
    redis: Redis

    def submit(self, task_id: str | None = None, **fields: Any) -> Any:
        """As its own service does; `options` are Celery's."""
        options = fields.pop("options", {})
        return self.app.send_task(
            "shardline.submit", kwargs=fields, task_id=task_id, queue=self.door.tasks, **options
        )

    def add(self, **fields: Any) -> None:
        """An entry of its stream."""
        self.redis.xadd(self.door.requests, {"request": json.dumps(fields)})


@contextmanager
def door_tenant(database_url: str, redis_url: str, name: str) -> Iterator[DoorTenant]:
    """With a user that the command makes; it goes with the test."""
    user = f"{name}_app"
    told = json.loads(shardline(database_url, redis_url, "grant-broker", name, user))
    parts = urlsplit(redis_url)
    url = f"redis://{user}:{told['password']}@{parts.hostname}:{parts.port}/0"
    app = Celery(name, broker=url, backend=url, set_as_current=False)
    app.conf.result_backend_transport_options = told["result_backend_transport_options"]
    try:
        with Redis.from_url(url) as redis:
            door = TenantDoor.of(name)
            yield DoorTenant(door=door, user=user, url=url, app=app, redis=redis)
    finally:
        app.close()
        with Redis.from_url(redis_url) as root:
            root.acl_deluser(user)
