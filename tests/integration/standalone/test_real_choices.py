"""Several choices of one request from a chat model with trained weights, by OpenAI's own client:
what each would say alone, whole, streamed, and again after the processes that had them were
killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from openai import OpenAI

from shardline.client import Client
from shardline.contract.choices import choice_seed
from shardline_server.failpoints import ArmedPoint, Point
from tests.chaos.faults.arming import Arming
from tests.real_model import NAME
from tests.stack import Stack

NUM = 3
SEED = 11
FIELDS: Any = {
    "model": NAME,
    "messages": [{"role": "user", "content": "Tell me a short story of a cat."}],
    "max_tokens": 48,
}
FAILPOINTS = "failpoints"


@pytest.fixture(scope="module")
def stack(real_stack: Stack) -> Stack:
    return real_stack


@pytest.fixture
def failpoints(stack: Stack) -> Path:
    return Path(stack.settings["SHARDLINE_FAILPOINTS"])


@pytest.fixture(scope="module")
def alone(openai: OpenAI) -> list[str | None]:
    """What each choice says when it is asked for by itself."""
    seeds = [choice_seed(SEED, place) for place in range(NUM)]
    answers = [openai.chat.completions.create(**FIELDS, seed=seed) for seed in seeds]
    return [answer.choices[0].message.content for answer in answers]


def asked(openai: OpenAI, key: str, **fields: Any) -> Any:
    """All choices, under a key."""
    return openai.chat.completions.create(
        **FIELDS, **fields, n=NUM, seed=SEED, extra_headers={"Idempotency-Key": key}
    )


def contents(answer: Any) -> list[str | None]:
    return [choice.message.content for choice in answer.choices]


def num_rows(stack: Stack, key: str) -> int:
    with psycopg.connect(stack.urls["database"]) as connection:
        query = (
            "SELECT count(*) FROM jobs AS choices JOIN jobs ON jobs.id = choices.choice_of"
            " WHERE jobs.idempotency_key = %s"
        )
        ((num,),) = connection.execute(query, (key,)).fetchall()
    return int(num)


def test_choices_say_what_each_would_say_alone(openai: OpenAI, alone: list[str | None]) -> None:
    assert len(set(alone)) == NUM
    assert contents(asked(openai, "calm")) == alone
    texts = [""] * NUM
    for chunk in asked(openai, "streamed", stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == alone


def test_a_stored_completion_is_rebuilt_from_its_rows(openai: OpenAI) -> None:
    answer = asked(openai, "stored", store=True, logprobs=True, top_logprobs=2)
    found = openai.chat.completions.retrieve(answer.id)
    assert found.model_dump() == {**answer.model_dump(), "metadata": {}}


def test_a_gateway_that_dies_behind_the_commit_makes_no_second_set(
    stack: Stack, openai: OpenAI, failpoints: Path, alone: list[str | None]
) -> None:
    arming = Arming(failpoints, Point.GATEWAY_INSERTED, ArmedPoint(action="kill"))
    answer = asked(openai, "gateway")
    assert arming.num_strikes == 1
    assert contents(answer) == alone
    assert num_rows(stack, "gateway") == NUM


def test_choices_are_the_same_after_all_services_were_killed_in_the_middle(
    stack: Stack, openai: OpenAI, alone: list[str | None]
) -> None:
    stream = asked(openai, "killed", stream=True)
    for _, chunk in zip(range(2 * NUM), stream, strict=False):
        assert chunk.choices
    killed = stack.look()["processes"]
    for name, pid in killed.items():
        if name.startswith(("gateway", "relay", "stage")):
            psutil.Process(pid).kill()
    assert contents(asked(openai, "killed")) == alone
    assert num_rows(stack, "killed") == NUM


def test_a_repeat_of_many_with_n_finds_all(stack: Stack, alone: list[str | None]) -> None:
    request = {**FIELDS, "seed": SEED, "idempotency_key": "python"}
    with Client(database_url=stack.urls["database"], redis_url=stack.urls["redis"]) as client:
        ids = client.submit_many([request], n=NUM)
        assert client.submit_many([request], n=NUM) == ids
        jobs = client.wait(ids, timeout_s=120)
    assert [job.result and job.result.text for job in jobs] == alone
