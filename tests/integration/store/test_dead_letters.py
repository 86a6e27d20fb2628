"""Dead letters on a real Postgres: listed, shown with their attempts, replayed; in the store, the
clients, the CLI."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine
from typer.testing import CliRunner, Result

from shardline.base.errors import Conflict, Invalid, NotFound
from shardline.cli.commands import cli
from shardline.client import AsyncClient, Client
from shardline.contract.job import JobState
from shardline_server.store import sweeps
from tests.integration.rows import MODEL, cell, change, claim, pass_time, submit, success
from tests.integration.rows import end as end_jobs

Shardline = Callable[..., Result]


@pytest.fixture
def client(engine: Engine) -> Iterator[Client]:
    with Client(database=engine) as client:
        yield client


@pytest.fixture
def shardline(database_url: str) -> Shardline:
    def run(*arguments: object) -> Result:
        env = {"SHARDLINE_DATABASE_URL": database_url}
        return CliRunner().invoke(cli, [str(each) for each in arguments], env=env)

    return run


def die(engine: Engine, **fields: Any) -> UUID:
    """A job whose worker dies before its first token as often as it may."""
    (job_id,) = submit(engine, max_crashes=2, **fields)
    for _ in range(2):
        claim(engine, [job_id])
        with engine.begin() as connection:
            pass_time(connection, job_id, "lease_until")
        with engine.begin() as connection:
            sweeps.sweep_expired_leases(connection, lambda *_: "", lease_s=0.001)
    return job_id


def test_only_crashed_jobs_are_dead_letters_newest_first(engine: Engine, client: Client) -> None:
    dead = [die(engine) for _ in range(3)]
    (good,) = claim(engine, submit(engine))
    end_jobs(engine, success(good))
    submit(engine)
    change(
        engine,
        "UPDATE jobs SET state = 'failed', finished_at = now(), "
        'error = \'{"code": "engine"}\' WHERE fence = 0',
    )
    assert [job.id for job in client.list_dead()] == dead[::-1]
    assert [job.id for job in client.list_dead(limit=2)] == [dead[2], dead[1]]
    assert [job.id for job in client.list_dead(after=dead[1])] == [dead[0]]
    assert client.list_dead(model="another") == []


def test_an_index_finds_dead_letters_among_many_ended_jobs(engine: Engine) -> None:
    plan = cell(
        engine,
        "EXPLAIN (FORMAT JSON) SELECT id FROM jobs "
        "WHERE state = 'failed' AND error ->> 'code' = 'crashed' "
        "ORDER BY finished_at DESC, id DESC LIMIT 20",
    )
    assert "jobs_dead" in json.dumps(plan)


def test_a_dead_letter_shows_every_attempts_head_and_end(engine: Engine, client: Client) -> None:
    letter = client.get_dead(die(engine))
    assert [(one.fence, one.worker, one.num_tokens) for one in letter.attempts] == [
        (2, "h", 0),
        (1, "h", 0),
    ]
    assert [one.outcome for one in letter.attempts] == ["failed", "crashed"]
    assert all(one.ended_at is not None for one in letter.attempts)
    assert (letter.job.error or {})["crashes"] == 2


def test_replaying_a_dead_letter_makes_a_new_job_that_asks_the_same(
    engine: Engine, client: Client
) -> None:
    dead_id = die(
        engine,
        prompt="again",
        temperature=0.5,
        seed=42,
        priority=2,
        metadata={"order": 7},
        deadline_s=3600,
    )
    new_id = client.replay(dead_id)
    dead = client.get(dead_id)
    new = client.get(new_id)
    assert (new.state, new.replay_of, new.crashes, new.fence) == (JobState.QUEUED, dead_id, 0, 0)
    same = ("model", "tenant", "prompt", "params", "seed", "priority", "metadata")
    assert [getattr(new, name) for name in same] == [getattr(dead, name) for name in same]
    assert cell(engine, "SELECT max_crashes FROM jobs WHERE id = :id", id=new_id) == 2
    assert cell(
        engine,
        "SELECT prompt_ids IS NULL AND prepared_at IS NULL FROM jobs WHERE id = :id",
        id=new_id,
    )
    assert (dead.state, client.get_dead(dead_id).replays) == (JobState.FAILED, (new_id,))


def test_token_ids_are_the_prompt_of_a_replay(engine: Engine, client: Client) -> None:
    new = client.get(client.replay(die(engine, prompt=(5, 6))))
    assert (new.prompt, new.prompt_token_ids) == (None, (5, 6))


def test_replaying_twice_with_one_key_makes_one_replay(engine: Engine, client: Client) -> None:
    first = die(engine)
    second = die(engine)
    new_id = client.replay(first, idempotency_key="k")
    assert client.replay(first, idempotency_key="k") == new_id
    assert client.replay(first) != new_id
    with pytest.raises(Conflict, match="idempotency key"):
        client.replay(second, idempotency_key="k")
    with pytest.raises(Invalid, match="256"):
        client.replay(first, idempotency_key="")


def test_only_a_dead_letter_is_replayed_or_shown(engine: Engine, client: Client) -> None:
    (queued,) = submit(engine)
    for ask in (client.replay, client.get_dead):
        with pytest.raises(Invalid, match="no dead letter but queued"):
            ask(queued)
        with pytest.raises(NotFound):
            ask(uuid4())


async def test_the_asynchronous_client_answers_the_same(
    engine: Engine, client: Client, database_url: str
) -> None:
    dead_id = die(engine)
    async with AsyncClient(database_url=database_url) as asking:
        new_id = await asking.replay(dead_id, idempotency_key="k")
        assert await asking.list_dead() == client.list_dead()
        assert await asking.get_dead(dead_id) == client.get_dead(dead_id)
    assert client.get(new_id).replay_of == dead_id


def test_the_command_line_shows_what_happened_to_dead_letters(
    engine: Engine, shardline: Shardline
) -> None:
    dead_id = die(engine, prompt="poison")
    listed = shardline("dead", "list", "--model", MODEL).stdout
    assert [part for part in (str(dead_id), MODEL, "poison") if part not in listed] == []
    new_id = UUID(shardline("dead", "replay", dead_id, "--key", "k").stdout.strip())
    shown = shardline("dead", "show", dead_id).stdout
    assert [
        part
        for part in ("failed", "crashed", "0 → 0", f"replayed as {new_id}")
        if part not in shown
    ] == []
    assert f"replay of  {dead_id}" in " ".join(shardline("get", new_id).stdout.split("\n"))
    document = json.loads(shardline("dead", "show", dead_id, "--json").stdout)
    assert (document["job"]["id"], len(document["attempts"])) == (str(dead_id), 2)


def test_replaying_no_dead_letter_by_command_sets_the_exit_status(
    engine: Engine, shardline: Shardline
) -> None:
    (queued,) = submit(engine)
    ran = shardline("dead", "replay", queued)
    assert (ran.exit_code, "no dead letter" in ran.stderr) == (2, True)
    assert shardline("dead", "show", uuid4()).exit_code == 3
    assert shardline("dead", "replay", queued, uuid4(), "--key", "k").exit_code == 2
