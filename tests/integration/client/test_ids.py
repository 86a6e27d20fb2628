"""Ids of jobs as callers have them: every public method of both clients and every form of an id."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
import pytest_asyncio
from sqlalchemy.exc import SQLAlchemyError

from shardline.base.errors import Invalid, NotFound, ShardlineError
from shardline.client import AsyncClient, Client

ONE = ("job_id", "after")
MANY = ("ids",)
"""Names of parameters that take an id, or several."""

FORMS: dict[str, Callable[[UUID], object]] = {
    "text": str,
    "hex": lambda job_id: job_id.hex,
    "upper case": lambda job_id: str(job_id).upper(),
    "urn": lambda job_id: job_id.urn,
    "braces": lambda job_id: f"{{{job_id}}}",
}

GARBAGE = (
    "",
    "nonsense",
    "00000000-0000-0000-0000-00000000000g",
    "\0",
    "\ud800",
    "é" * 36,
    b"id",
    17,
    1.5,
    object(),
)


def id_parameters(client: type) -> list[tuple[str, str]]:
    """Method and parameter of each that takes ids."""
    return [
        (name, parameter)
        for name, method in inspect.getmembers(client, inspect.isfunction)
        if not name.startswith("_")
        for parameter in inspect.signature(method).parameters
        if parameter in (*ONE, *MANY)
    ]


CASES = id_parameters(Client)


def test_both_clients_take_ids_in_the_same_places() -> None:
    assert set(CASES) == set(id_parameters(AsyncClient))
    assert {name for name, _ in CASES} == {
        "cancel",
        "get",
        "get_dead",
        "get_many",
        "list",
        "list_dead",
        "replay",
        "stream",
        "wait",
    }
    annotated = [
        (name, parameter.name)
        for name, method in inspect.getmembers(Client, inspect.isfunction)
        for parameter in inspect.signature(method).parameters.values()
        if "JobId" in str(parameter.annotation)
    ]
    assert sorted(annotated) == sorted(CASES), (
        "a parameter of another name that takes an id belongs into this test"
    )


@pytest.fixture
def client(database_url: str, redis_url: str) -> Iterator[Client]:
    with Client(database_url=database_url, redis_url=redis_url) as client:
        yield client


@pytest_asyncio.fixture
async def async_client(database_url: str, redis_url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(database_url=database_url, redis_url=redis_url) as client:
        yield client


@pytest.fixture
def ended(client: Client) -> UUID:
    """A job that has ended, so that nothing waits for it, and an older one."""
    client.submit("clerk", "hello")
    job_id = client.submit("clerk", "hello")
    client.cancel(job_id)
    return job_id


def called(client: Client, method: str, parameter: str, value: object) -> object:
    """What the method gives or raises."""
    try:
        found = getattr(client, method)(**{parameter: value}, **more(method))
        return list(found) if method == "stream" else found
    except ShardlineError as error:
        return type(error), str(error)


async def called_async(client: AsyncClient, method: str, parameter: str, value: object) -> object:
    """The same of the client for asyncio."""
    try:
        found = getattr(client, method)(**{parameter: value}, **more(method))
        return [each async for each in found] if method == "stream" else await found
    except ShardlineError as error:
        return type(error), str(error)


def more(method: str) -> dict[str, Any]:
    """Arguments without which `wait` raises for a job that was canceled."""
    return {"timeout_s": 60, "must_succeed": False} if method == "wait" else {}


def shapes(method: str, parameter: str, value: object) -> list[object]:
    """Alone and in a list, as the parameter allows."""
    several: list[object] = [[value], (value,), {value}] if parameter in MANY else []
    return several if method == "get_many" else [value, *several]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids="-".join)
async def test_an_id_in_any_form_does_what_its_uuid_does(
    client: Client, async_client: AsyncClient, ended: UUID, case: tuple[str, str], form: str
) -> None:
    method, parameter = case
    for shape, as_uuid in zip(
        shapes(method, parameter, FORMS[form](ended)), shapes(method, parameter, ended), strict=True
    ):
        wanted = called(client, method, parameter, as_uuid)
        assert called(client, method, parameter, shape) == wanted
        assert await called_async(async_client, method, parameter, shape) == wanted
        assert wanted != [] or method == "list_dead", "it is there"
        if isinstance(wanted, tuple):
            assert wanted[0] is not NotFound


@pytest.mark.parametrize(("method", "parameter"), CASES)
async def test_what_is_no_id_is_named_and_asks_nothing_of_postgres(
    client: Client, async_client: AsyncClient, method: str, parameter: str
) -> None:
    for garbage in GARBAGE:
        for shape in shapes(method, parameter, garbage):
            for found in (
                called(client, method, parameter, shape),
                await called_async(async_client, method, parameter, shape),
            ):
                assert isinstance(found, tuple), (garbage, found)
                assert found[0] is Invalid
                assert str(found[1]).startswith(("id: ", "ids", "after: ")), found


def test_several_ids_in_one_text_are_not_taken_for_letters(client: Client) -> None:
    with pytest.raises(Invalid, match=r"^ids: str is no list of ids"):
        client.get_many(str(uuid4()))


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.list(model="nul\0"),
        lambda client: client.list(model="\ud800"),
        lambda client: client.list(limit=-1),
        lambda client: client.list(state="nul\0"),
        lambda client: client.list_dead(limit=-1),
        lambda client: client.list_dead(model="nul\0"),
    ],
)
async def test_no_value_ends_in_an_error_of_the_driver(
    client: Client, async_client: AsyncClient, ask: Callable[[Any], Any]
) -> None:
    with pytest.raises(Invalid):
        ask(client)
    with pytest.raises(Invalid):
        await ask(async_client)


async def test_a_database_without_our_tables_is_told_so(
    empty_database_url: str, redis_url: str
) -> None:
    message = "lacks Shardline's tables: run `alembic upgrade head`"
    with (
        Client(database_url=empty_database_url, redis_url=redis_url) as client,
        pytest.raises(ShardlineError, match=message) as caught,
    ):
        client.submit("clerk", "hello")
    assert isinstance(caught.value.__cause__, SQLAlchemyError)
