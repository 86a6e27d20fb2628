"""`shardline tenant grant-broker`, `revoke-broker` and `brokers` against a real Redis and
Postgres."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from redis import Redis
from typer.testing import CliRunner, Result

from shardline.cli.commands import cli

Shardline = Callable[..., Result]


@pytest.fixture
def shardline(database_url: str, redis_url: str) -> Shardline:
    def run(*arguments: str) -> Result:
        environment = {"SHARDLINE_DATABASE_URL": database_url, "SHARDLINE_REDIS_URL": redis_url}
        return CliRunner().invoke(cli, ["tenant", *arguments], env=environment)

    return run


def users(redis_url: str) -> set[str]:
    with Redis.from_url(redis_url) as redis:
        return set(redis.acl_users())


def test_a_user_is_made_listed_and_deleted(shardline: Shardline, redis_url: str) -> None:
    before = users(redis_url)
    first = json.loads(shardline("grant-broker", "acme", "made").stdout)
    second = json.loads(shardline("grant-broker", "acme", "made").stdout)
    assert first["password"] != second["password"]
    assert users(redis_url) == {*before, "made"}
    assert json.loads(shardline("brokers", "--json").stdout) == {"user": "made", "tenant": "acme"}
    assert shardline("revoke-broker", "made").exit_code == 0
    assert users(redis_url) == before
    assert shardline("brokers", "--json").stdout == ""


def test_users_of_others_are_left_alone(shardline: Shardline, redis_url: str) -> None:
    with Redis.from_url(redis_url) as redis:
        redis.acl_setuser("relay", enabled=True, nopass=True, categories=["+@all"])
        before = redis.execute_command("ACL", "GETUSER", "relay")
        assert shardline("grant-broker", "acme", "relay").exit_code == 2
        assert redis.execute_command("ACL", "GETUSER", "relay") == before
        redis.acl_deluser("relay")
    shardline("grant-broker", "acme", "made")
    assert shardline("grant-broker", "bob", "made").exit_code == 2
    shardline("revoke-broker", "made")
    for name in ("default", "two words", ""):
        assert shardline("grant-broker", "acme", name).exit_code == 2
    assert shardline("revoke-broker", "relay").exit_code == 3


def test_what_is_printed_makes_the_user_elsewhere(shardline: Shardline, redis_url: str) -> None:
    before = users(redis_url)
    printed = shardline("grant-broker", "acme", "made", "--print").stdout
    assert printed.startswith("ACL SETUSER made reset on '#")
    assert "'(+xadd ~shardline:door:acme:requests)'" in printed
    assert shardline("revoke-broker", "made", "--print").stdout.startswith("ACL DELUSER made")
    assert users(redis_url) == before
