"""The tenants of the users' load: what their actors make of answers, right, wrong and lost ones."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import httpx
import psycopg
import pytest

from tests.chaos.load.journal import Journal
from tests.chaos.load.tenants.actor import OVER_QUOTA, TenantActor, TenantHome
from tests.chaos.load.tenants.bulk_actor import BulkActor
from tests.chaos.load.tenants.families import template
from tests.chaos.load.tenants.ledger import JobGroup, TenantLedger
from tests.chaos.load.tenants.pauser import TenantPauser
from tests.chaos.load.users import CLERK
from tests.chaos.load.workload import of_users

Said = tuple[int, Any] | Exception


class SureRandom(random.Random):
    """Draws one number again and again: the door is known."""

    def __init__(self, drawn: float) -> None:
        super().__init__()
        self._drawn = drawn

    def random(self) -> float:
        """Returns that number."""
        return self._drawn


def actor(
    kind: type[TenantActor], database_url: str = "postgresql://none", *, by_sql: bool = False
) -> TenantActor:
    """One that never runs by itself, and comes by one door."""
    urls = {"gateway": "http://gateway", "database": database_url, "api_key": "none"}
    return kind(
        home=TenantHome(tenant="default", urls=urls, operator_urls=urls, database_url=database_url),
        ledger=TenantLedger(),
        journal=Journal(),
        workload=of_users([CLERK]),
        stopping=threading.Event(),
        drained=threading.Event(),
        rng=SureRandom(0.0 if by_sql else 0.9),
    )


def saying(*answers: Said) -> httpx.Client:
    """A gateway that says this, one after the other."""
    left: Iterator[Said] = iter(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        said = next(left)
        if isinstance(said, Exception):
            raise said
        return httpx.Response(said[0], json=said[1], request=request)

    return httpx.Client(transport=httpx.MockTransport(answer), base_url="http://gateway")


FULL = (429, {"error": {"code": OVER_QUOTA}})
BUSY = (429, {"error": {"code": "overloaded"}})
LOST = httpx.ReadError("lost")
TAKEN: Said = (202, {})


@pytest.mark.parametrize(
    ("answers", "promised", "refused", "complaints"),
    [
        pytest.param([TAKEN], 1, 0, 0, id="taken"),
        pytest.param([LOST, BUSY, TAKEN], 1, 0, 0, id="taken in the end"),
        pytest.param([LOST, FULL], 0, 1, 0, id="no room"),
        pytest.param([(400, {})], 0, 0, 1, id="a good request was refused"),
    ],
)
def test_an_answer_to_a_tenant_is_kept(
    answers: list[Said], promised: int, refused: int, complaints: int
) -> None:
    sender = actor(TenantActor)
    with saying(*answers) as http:
        job_id = sender.submit(http, sender.fields(0))
    assert (job_id is not None) == bool(promised)
    assert (len(sender.ledger.promised), len(sender.ledger.refused)) == (promised, refused)
    assert len(sender.journal.complaints()) == complaints


def test_a_row_of_sql_is_the_same_request_and_no_second_one(database_url: str) -> None:
    sender = actor(TenantActor, database_url, by_sql=True)
    fields = sender.fields(2)
    with saying() as http:
        assert [sender.submit(http, fields) for _ in range(2)] == [UUID(fields["id"])] * 2
    with psycopg.connect(database_url) as connection:
        rows = connection.execute("SELECT prompt, metadata ->> 'number' FROM jobs").fetchall()
    assert rows == [(fields["prompt"], "2")]


def test_a_quota_refuses_a_row_of_sql(database_url: str) -> None:
    sender = actor(TenantActor, database_url, by_sql=True)
    with psycopg.connect(database_url) as connection:
        connection.execute("INSERT INTO quotas (tenant_id, max_queued) VALUES ('default', 1)")
    with saying() as http:
        found = [sender.submit(http, sender.fields(0)) is not None for _ in range(2)]
    assert found == [True, False]
    assert len(sender.ledger.refused) == 1


@pytest.mark.parametrize(
    ("answers", "changed", "num_unanswered", "complaints"),
    [
        pytest.param([3, 0], {"cancel": 3}, 0, 0, id="all at once"),
        pytest.param([LOST, 1, 0], {"cancel": 1}, 1, 0, id="an answer is lost"),
        pytest.param([3] * 5, {}, 0, 1, id="it changes the same again and again"),
    ],
)
def test_an_act_is_asked_for_until_nothing_is_left(
    answers: list[Any], changed: dict[str, int], num_unanswered: int, complaints: int
) -> None:
    user = actor(BulkActor)
    assert isinstance(user, BulkActor)
    group = JobGroup(name="g", held=[], live=[], again=[], priority=1)
    told = [
        (200, {"changed": one, "has_more": False}) if isinstance(one, int) else one
        for one in answers
    ]
    with saying(*told) as http:
        user.change(http, group, "cancel", {})
    assert (group.changed, group.num_unanswered) == (changed, {"cancel": num_unanswered})
    assert len(user.journal.complaints()) == complaints


def test_a_pause_of_sql_may_come_twice_and_a_resumption_too(database_url: str) -> None:
    operator = actor(TenantPauser, database_url, by_sql=True)
    assert isinstance(operator, TenantPauser)
    count = "SELECT count(*) FROM pauses"
    steps: list[tuple[Callable[[str, str], None], int]] = [
        (operator.pause, 1), (operator.pause, 1), (operator.resume, 0), (operator.resume, 0)
    ]  # fmt: skip
    for step, num in steps:
        step("tag", "a=b")
        assert operator.rows(count) == [(num,)]


def test_a_template_has_a_place_for_each_parent() -> None:
    assert template([UUID(int=1), UUID(int=2)]) == "{{part_0}} + {{part_1}} ="
