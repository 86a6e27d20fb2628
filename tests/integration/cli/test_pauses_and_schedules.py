"""`shardline pause`, `resume` and `schedule` against a real Postgres."""

from __future__ import annotations

import getpass
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import text
from typer.testing import CliRunner, Result

from shardline.cli.commands import cli
from shardline.store.connection.database import transaction
from shardline_server.store import outbox, paused_jobs
from tests.tiny_head import TinyHead, tiny_head

LATE = text("""
INSERT INTO jobs (model, prompt_ids, max_tokens, prepared_at, created_at, not_before)
SELECT 'clerk', ARRAY[5], 1, now(), before, before
FROM (SELECT now() - interval '1 minute' AS before) AS clock
""")
BATCH = "batch_01890000-0000-7000-8000-000000000000"


@pytest.fixture
def shardline(database_url: str, redis_url: str) -> Callable[..., Result]:
    urls = {"SHARDLINE_DATABASE_URL": database_url, "SHARDLINE_REDIS_URL": redis_url}
    return lambda *arguments: CliRunner().invoke(cli, arguments, env=urls)


def documents(ran: Result) -> list[dict[str, Any]]:
    assert ran.exit_code == 0, ran.output
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_what_is_paused_is_listed_until_it_is_resumed(shardline: Callable[..., Result]) -> None:
    for kind, target in (("tenant", "acme"), ("tag", "team=a b"), ("batch", BATCH)):
        assert shardline("pause", kind, target, "--reason", "unpaid").exit_code == 0
    listed = documents(shardline("pause", "--json"))
    assert [(each["kind"], each["target"], each["reason"]) for each in listed] == [
        ("tenant", "acme", "unpaid"),
        ("tag", "team=a b", "unpaid"),
        ("batch", BATCH.removeprefix("batch_"), "unpaid"),
    ]
    assert "unpaid" in shardline("pause").stdout
    assert shardline("resume", "batch", BATCH).exit_code == 0
    assert shardline("resume", "batch", BATCH).exit_code == 3
    for wrong in (("pause", "tag", "team"), ("pause", "tenant"), ("pause", "city", "Rome")):
        assert shardline(*wrong).exit_code == 2
    assert len(documents(shardline("pause", "--json"))) == 2


@pytest.mark.usefixtures("ready_head")
def test_doctor_and_top_know_that_a_paused_job_is_no_fault(
    shardline: Callable[..., Result], database_url: str
) -> None:
    with transaction(database_url) as connection:
        connection.execute(LATE)
    assert shardline("doctor").exit_code == 1
    assert shardline("pause", "model", "clerk").exit_code == 0
    with transaction(database_url) as connection:
        assert paused_jobs.settle(connection) == 1
        assert outbox.stamp_due(connection, resend_s=1.0) == []
    ran = shardline("doctor")
    assert (ran.exit_code, "model clerk" in ran.stdout) == (0, True), ran.stdout
    (look,) = documents(shardline("top", "--once", "--json", "--every", "0.5"))
    counts = {"num_queued": 0, "num_running": 0, "num_paused": 1, "num_waiting": 0}
    assert look["tenants"] == {"default": counts}


@pytest.fixture
def ready_head(database_url: str, redis_url: str) -> Iterator[TinyHead]:
    with tiny_head(database_url, redis_url) as head:
        head.ready()
        yield head


def test_schedules_are_made_listed_paused_and_removed(shardline: Callable[..., Result]) -> None:
    made = ("nightly", "30 2 * * *", "sum: 1 + 2 =", "-m", "clerk", "--time-zone", "Europe/Berlin")
    (schedule,) = documents(shardline("schedule", "add", *made, "-f", "max_tokens=8", "--json"))
    assert schedule["request"] == {"model": "clerk", "prompt": "sum: 1 + 2 =", "max_tokens": 8}
    assert schedule["next_at"]
    assert shardline("schedule", "add", *made).exit_code == 2
    chat = ("chat", "* * * * *", "hello", "-m", "clerk", "--chat", "--tenant", "acme")
    (schedule,) = documents(shardline("schedule", "add", *chat, "--json"))
    assert schedule["request"]["messages"] == [{"role": "user", "content": "hello"}]
    for wrong in (
        ("x", "* * *", "a"),
        ("x", "* * * * *"),
        ("x", "* * * * *", "a", "-f", "top_p=7"),
    ):
        assert shardline("schedule", "add", *wrong, "-m", "clerk").exit_code == 2

    assert shardline("schedule", "pause", "nightly").exit_code == 0
    listed = documents(shardline("schedule", "list", "--json"))
    assert [(each["name"], each["paused"]) for each in listed] == [
        ("chat", False),
        ("nightly", True),
    ]
    assert "paused" in shardline("schedule", "list").stdout
    assert shardline("schedule", "resume", "nightly").exit_code == 0
    assert shardline("schedule", "remove", "chat").exit_code == 3
    assert shardline("schedule", "remove", "chat", "--tenant", "acme").exit_code == 0
    assert shardline("schedule", "remove", "nightly").exit_code == 0
    assert documents(shardline("schedule", "list", "--json")) == []


def test_the_audit_log_names_the_user_of_the_command_line(
    shardline: Callable[..., Result],
) -> None:
    assert shardline("pause", "tenant", "acme").exit_code == 0
    assert shardline("pause", "tenant", "other").exit_code == 0
    assert shardline("cancel", "--where", "model=nobody's").exit_code == 0
    assert shardline("resume", "tenant", "acme").exit_code == 0
    resumed, other, paused = documents(shardline("audit", "--json", "--limit", "3"))
    actor = f"cli {getpass.getuser()}"
    assert {one["actor"] for one in (resumed, other, paused)} == {actor}
    assert [one["act"] for one in (resumed, other, paused)] == ["resume", "pause", "pause"]
    assert paused["object_id"] == "tenant acme"
    assert documents(shardline("audit", "--json", "--act", "resume", "--actor", actor)) == [resumed]
    assert documents(shardline("audit", "--json", "--since", "9000-01-01")) == []
    assert "tenant acme" in shardline("audit").stdout
