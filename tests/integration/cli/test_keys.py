"""`shardline keys` against a real Postgres: made once, shown once, replaced with a grace, ended."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from typer.testing import CliRunner, Result

from shardline.cli.commands import cli
from shardline.contract.api_key import Scope, new_key, parse_key
from shardline.store import api_keys
from shardline.store.api_keys import KeyRecord
from shardline.store.connection.database import connect
from tests.api_keys import secret_of

Shardline = Callable[..., Result]


@pytest.fixture
def shardline(database_url: str) -> Shardline:
    def run(*arguments: object) -> Result:
        environment = {"SHARDLINE_DATABASE_URL": database_url}
        return CliRunner().invoke(
            cli, ["keys", *(str(each) for each in arguments)], env=environment
        )

    return run


def known(database_url: str, key: str) -> KeyRecord:
    """As a gateway reads it."""
    engine = connect(database_url)
    with engine.connect() as connection:
        found = api_keys.find(connection, [parse_key(key).key_id])
    engine.dispose()
    return found[parse_key(key).key_id]


def listed(shardline: Shardline) -> list[dict[str, Any]]:
    return [json.loads(line) for line in shardline("list", "--json").stdout.splitlines()]


def test_a_key_is_printed_once_and_only_its_hash_is_stored(
    shardline: Shardline, database_url: str
) -> None:
    ran = shardline(
        "create", "reports", "--tenant", "acme", "--scopes", "read,submit", "--days", "1"
    )
    key = ran.stdout.strip()
    stored = known(database_url, key)
    assert (stored.tenant, stored.scopes, stored.is_revoked) == (
        "acme",
        frozenset({Scope.READ, Scope.SUBMIT}),
        False,
    )
    assert stored.expires_in_s is not None
    assert 86_000 < stored.expires_in_s <= 86_400
    assert parse_key(key).matches(stored.digest)
    secret = key.removeprefix(f"sk-shardline-{parse_key(key).key_id}-")
    engine = connect(database_url)
    with engine.connect() as connection:
        (row,) = connection.scalars(text("SELECT api_keys::text FROM api_keys"))
    engine.dispose()
    assert secret not in row
    assert secret not in shardline("list").stdout + shardline("list", "--json").stdout
    assert [(each["name"], each["tenant"], each["scopes"]) for each in listed(shardline)] == [
        ("reports", "acme", ["submit", "read"])
    ]


def test_a_key_acts_on_all_tenants_only_where_that_was_asked_for(shardline: Shardline) -> None:
    shardline("create", "a", "--tenant", "acme")
    shardline("create", "b", "--scopes", "admin")
    assert {each["name"]: each["scopes"] for each in listed(shardline)} == {
        "a": ["submit", "read", "cancel"],
        "b": ["admin"],
    }


def test_only_its_owner_can_read_a_key_made_into_a_file(
    shardline: Shardline, database_url: str, tmp_path: Path
) -> None:
    file = tmp_path / "key"
    ran = shardline("create", "a", "--output", file)
    assert (ran.exit_code, stat.S_IMODE(file.stat().st_mode)) == (0, 0o600)
    assert known(database_url, file.read_text()).tenant == "default"
    assert secret_of(file.read_text().strip()) not in ran.output
    again = shardline("create", "b", "--output", file)
    assert (again.exit_code, "--output" in again.stderr) == (2, True)
    assert [key["name"] for key in listed(shardline)] == ["a"], "a wrong path leaves no key"


def test_a_key_is_not_written_through_a_link(shardline: Shardline, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert shardline("create", "a", "--output", tmp_path / "link").exit_code == 2
    assert not (tmp_path / "target").exists()


def test_a_rotated_key_stays_valid_for_a_while_beside_the_new_one(
    shardline: Shardline, database_url: str
) -> None:
    old = shardline(
        "create", "a", "--tenant", "acme", "--scopes", "read", "--days", "2"
    ).stdout.strip()
    new = shardline("rotate", "a", "--grace-hours", "1").stdout.strip()
    first = known(database_url, old)
    second = known(database_url, new)
    assert (
        (second.tenant, second.scopes)
        == (first.tenant, first.scopes)
        == ("acme", frozenset({Scope.READ}))
    )
    assert first.expires_in_s is not None
    assert second.expires_in_s is not None
    assert 0 < first.expires_in_s <= 3_600
    assert 172_000 < second.expires_in_s <= 172_800
    shardline("rotate", "a", "--grace-hours", "100")
    again = known(database_url, old).expires_in_s
    assert again is not None
    assert again <= 3_600, "what is replaced is not prolonged"
    assert [key["name"] for key in listed(shardline)] == ["a"] * 3


def test_revoking_a_name_ends_all_of_its_keys_and_an_id_only_one(
    shardline: Shardline, database_url: str
) -> None:
    old = shardline("create", "a").stdout.strip()
    new = shardline("rotate", "a").stdout.strip()
    assert shardline("revoke", parse_key(old).key_id).exit_code == 0
    assert (known(database_url, old).is_revoked, known(database_url, new).is_revoked) == (
        True,
        False,
    )
    assert shardline("revoke", "a").stdout == f"{parse_key(new).key_id} revoked\n"
    assert shardline("revoke", "a").exit_code == 3
    assert shardline("rotate", "a").exit_code == 3
    assert shardline("create", "a").exit_code == 0, "the name is free again"


def test_storing_a_known_key_again_changes_nothing_even_if_it_was_revoked(
    shardline: Shardline, database_url: str, tmp_path: Path
) -> None:
    file = tmp_path / "api_key"
    file.write_text(f"{new_key()}\n")
    assert "stored" in shardline("create", "compose", "--from-file", file).stdout
    assert "was there" in shardline("create", "compose", "--from-file", file).stdout
    shardline("revoke", "compose")
    assert "was there" in shardline("create", "compose", "--from-file", file).stdout
    assert known(database_url, file.read_text().strip()).is_revoked
    forged = file.read_text().strip()[:-43] + new_key()[-43:]
    file.write_text(forged)
    refused = shardline("create", "forged", "--from-file", file)
    assert (refused.exit_code, forged in refused.output) == (2, False)


def test_a_new_secret_file_replaces_the_key_of_its_name_when_told(
    shardline: Shardline, database_url: str, tmp_path: Path
) -> None:
    first = new_key()
    second = new_key()
    (tmp_path / "first").write_text(first)
    (tmp_path / "second").write_text(second)
    create = ("create", "compose", "--from-file")
    assert "stored" in shardline(*create, tmp_path / "first", "--replace").stdout
    refused = shardline(*create, tmp_path / "second")
    assert (refused.exit_code, "another key is named" in refused.stderr) == (2, True)

    assert "stored" in shardline(*create, tmp_path / "second", "--replace").stdout
    assert "was there" in shardline(*create, tmp_path / "second", "--replace").stdout

    assert known(database_url, second).expires_in_s is None
    left_s = known(database_url, first).expires_in_s
    assert left_s is not None
    assert 86_000 < left_s <= 86_400


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("create", "a", "--scopes", "write"), "scopes: 'write' is none"),
        (("create", "a", "--scopes", ""), "scopes"),
        (("create", ""), "name"),
        (("create", "x" * 65), "name"),
        (("create", "a", "--tenant", "a\nb"), "tenant"),
        (("create", "taken"), "exists; rotate it"),
    ],
)
def test_a_wrong_request_makes_no_key_and_says_why_in_one_line(
    shardline: Shardline, arguments: tuple[str, ...], words: str
) -> None:
    shardline("create", "taken")
    ran = shardline(*arguments)
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert words in ran.stderr
    assert [key["name"] for key in listed(shardline)] == ["taken"]
