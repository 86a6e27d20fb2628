"""API keys as a gateway remembers them: what guesses cost, and what a Postgres that says nothing
does to callers."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import event

from services.gateway import keyring
from services.gateway.keyring import Keyring
from shardline.base.errors import Overload, Unavailable
from shardline.contract.api_key import new_key, parse_key
from shardline.store.connection.database import connect_async
from tests.integration.gateway.running_gateway import make_key


@asynccontextmanager
async def a_keyring(
    database_url: str, *, fresh_s: float = 60
) -> AsyncIterator[tuple[Keyring, list[str]]]:
    """A keyring, and the statements that it has sent."""
    database = connect_async(database_url)
    statements: list[str] = []
    event.listen(
        database.sync_engine,
        "before_cursor_execute",
        lambda _c, _k, statement, *_: statements.append(statement),
    )
    ring = Keyring(database, fresh_s=fresh_s)
    try:
        yield ring, statements
    finally:
        await ring.close()
        await database.dispose()


def id_of(key: str) -> str:
    return parse_key(key).key_id


async def test_concurrent_guesses_are_looked_up_by_one_query_at_a_time(database_url: str) -> None:
    async with a_keyring(database_url) as (ring, statements):
        entries = await asyncio.gather(*(ring.get(id_of(new_key())) for _ in range(200)))
        assert {entry.known for entry in entries} == {None}
        assert len(statements) == 2, "the first one's, and that of all who came meanwhile"


async def test_endless_guesses_take_little_memory_and_push_out_no_valid_key(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyring, "MAX_REMEMBERED", 8)
    key_id = id_of(make_key(database_url))
    async with a_keyring(database_url) as (ring, statements):
        entry = await ring.get(key_id)
        guesses = [id_of(new_key()) for _ in range(40)]
        assert [(await ring.get(guess)).known for guess in guesses] == [None] * 40
        assert len(ring._unknown) == 8
        before = len(statements)
        assert await ring.get(key_id) is entry
        assert (await ring.get(guesses[-1])).known is None
        assert len(statements) == before, "both are remembered"


async def test_guesses_beyond_the_waiting_room_are_told_to_come_back(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyring, "MAX_WAITING", 8)
    async with a_keyring(database_url) as (ring, _):
        asked = (ring.get(id_of(new_key())) for _ in range(40))
        answers = await asyncio.gather(*asked, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, BaseException)]
        assert {type(answer) for answer in refused} == {Overload}
        assert len(answers) - len(refused) >= 8
        assert (await ring.get(id_of(new_key()))).known is None, "and then there is room again"


async def test_a_known_key_does_not_wait_for_a_silent_postgres(database_url: str) -> None:
    key_id = id_of(make_key(database_url))
    async with a_keyring(database_url, fresh_s=0) as (ring, _):
        entry = await ring.get(key_id)
        async with await psycopg.AsyncConnection.connect(database_url) as silence:
            await silence.execute("LOCK TABLE api_keys")
            assert await ring.get(key_id) is entry
            with pytest.raises(Unavailable):
                await ring.get(id_of(new_key()))
            assert await ring.get(key_id) is entry
            assert ring._query is not None
            assert not ring._query.done(), "and nobody waits for it"
        await asyncio.wait({ring._query}, timeout=60)
        again = ring._keys[key_id]
        assert (again is not entry, again.known) == (True, entry.known), (
            "what it said in the end is known"
        )


async def test_a_look_up_that_fails_when_nobody_waits_is_no_defect(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyring, "LOOKUP_S", 0.1)
    defects: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: defects.append(context))
    async with a_keyring(database_url) as (ring, _):
        async with await psycopg.AsyncConnection.connect(database_url) as silence:
            await silence.execute("LOCK TABLE api_keys")
            with pytest.raises(Unavailable):
                await ring.get(id_of(new_key()))
            await silence.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        query, ring._query = ring._query, None
        assert query is not None
        await asyncio.wait({query}, timeout=60)
        assert query.done()
        del query
        gc.collect()  # asyncio reports what nobody has read when the task is freed
    assert defects == []
