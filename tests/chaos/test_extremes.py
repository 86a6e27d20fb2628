"""Numbers at their limits in the users' load: none is left out, doors take them all, and nothing
beyond."""

from __future__ import annotations

import random
import threading
from uuid import UUID, uuid4

import httpx
import psycopg
import pytest
from psycopg.types.json import Jsonb

from shardline.base.errors import Invalid, Unavailable
from shardline.contract.request_parsing import parse_request
from tests.chaos.judge.checker import judge
from tests.chaos.load.doors import TAKEN, Answer
from tests.chaos.load.extremes import NUMBERS, SAMPLED, beyond, job_limits, no_number
from tests.chaos.load.journal import Journal
from tests.chaos.load.limit_prober import LimitProber
from tests.chaos.load.requests import Request
from tests.chaos.load.users import CLERK, SCRIBE
from tests.chaos.load.workload import BEYOND, Dress, of_users
from tests.extreme_fields import limits

LENGTHS = ("max_tokens", "min_tokens")
JOB = (
    "INSERT INTO jobs (id, model, prompt, metadata, state, finished_at)"
    " VALUES (%s, 'clerk', 'p', %s, %s, %s)"
)
REQUEST = httpx.Request("POST", "http://gateway/v1/jobs")


def test_every_number_of_a_completion_is_asked_for_at_each_of_its_limits() -> None:
    requests = of_users([CLERK, SCRIBE]).requests
    for name, kind in SAMPLED.items():
        asked = {str(one[name]) for one in requests if name in one}
        wanted = [value for value in limits(kind) if name not in LENGTHS or value < CLERK.limit]
        assert {str(value) for value in wanted} <= asked, name


def test_limits_are_combined_the_same_way_every_time() -> None:
    combined = [one for one in of_users([SCRIBE]).requests if one.keys() >= SAMPLED.keys()]
    assert len(combined) > 1
    assert combined == [one for one in of_users([SCRIBE]).requests if one.keys() >= SAMPLED.keys()]


def test_every_other_number_of_a_job_is_worn_at_each_of_its_limits() -> None:
    worn = [fields for fields, _ in job_limits()]
    assert {name for fields in worn for name in fields} | set(SAMPLED) == set(NUMBERS)
    dresses = [of_users([CLERK]).dress(random.Random(seed)) for seed in range(2000)]
    assert all(any(fields.items() <= dress.fields.items() for dress in dresses) for fields in worn)
    for fields in worn:
        parse_request({"model": "m", "prompt": "p", **fields})


def test_every_request_is_a_request_at_each_limit_of_a_job() -> None:
    workload = of_users([CLERK])
    for number in range(len(workload.requests)):
        for fields, _ in job_limits():
            parse_request({"model": "m", **workload.dressed(number, Dress(fields=fields))})


@pytest.mark.parametrize("fields", [*beyond(), *no_number()], ids=str)
def test_nothing_beyond_a_limit_is_a_request(fields: Request) -> None:
    with pytest.raises(Invalid):
        parse_request({"model": "m", "prompt": "p", **fields})


@pytest.mark.parametrize(
    ("answer", "num_found"),
    [
        pytest.param(Invalid("top_p", "too much", "less"), 0, id="refused"),
        pytest.param(Unavailable("away"), 0, id="away"),
        pytest.param(TAKEN, 0, id="a door that only takes it"),
        pytest.param(Answer(job_id=uuid4()), 1, id="accepted"),
        pytest.param(400, 0, id="refused over HTTP"),
        pytest.param(503, 0, id="busy"),
        pytest.param(500, 1, id="an error of its own"),
    ],
)
def test_only_what_is_taken_or_breaks_a_door_is_counted(
    answer: Answer | Exception | int, num_found: int
) -> None:
    def door(_: UUID | None, request: Request) -> Answer:
        if isinstance(answer, Answer):
            return answer
        if isinstance(answer, int):
            raise httpx.HTTPStatusError(
                "no", request=REQUEST, response=httpx.Response(answer, request=REQUEST)
            )
        raise answer

    journal = Journal()
    never = threading.Event()
    prober = LimitProber(
        doors={"http": door}, journal=journal, stopping=never, drained=never, rng=random.Random(1)
    )
    prober.probe()
    assert [finding.count for finding in journal.complaints()] == ["admitted"] * num_found


@pytest.mark.parametrize(("state", "found"), [("failed", []), ("succeeded", ["admitted"])])
def test_a_job_beyond_a_limit_may_only_have_failed(
    database_url: str, state: str, found: list[str]
) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute(JOB, (uuid4(), Jsonb(BEYOND), state, "now"))
    assert [finding.count for finding in judge(database_url, [], [], [])] == found
