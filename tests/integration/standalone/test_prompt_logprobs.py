"""Log-probabilities of prompts on a whole stack of a chat model with trained weights: the same at
every door, in the answers of OpenAI's routes, and after the stages were killed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from openai import BadRequestError, OpenAI

from services.standalone.demo.producers import DOORS, Producer
from shardline.client import Client
from shardline.contract.ids import new_id
from shardline.contract.job import JobRequest, PromptLogprob
from tests.real_model import NAME, real_model
from tests.stack import ForkedStack, Stack

PROMPT = "The capital of France is Paris, and the capital of Italy is Rome. " * 10
NUM_TOP = 2
FIELDS: Any = {"model": NAME, "prompt": PROMPT, "temperature": 0.0}
TIMEOUT_S = 300.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {"SHARDLINE_MODEL": str(real_model()), "SHARDLINE_MODEL_NAME": NAME}
    stack = ForkedStack(tmp_path_factory.mktemp("scores"), **settings)
    stack.start()
    yield stack
    stack.end()
    assert stack.left() == []


@pytest.fixture(scope="module")
def openai(stack: Stack) -> Iterator[OpenAI]:
    url = f"{stack.urls['gateway']}/v1"
    with OpenAI(base_url=url, api_key=stack.urls["api_key"], max_retries=20) as openai:
        yield openai


def of(client: Client, request: JobRequest) -> list[PromptLogprob]:
    """Those of an ended job's tokens, but for the first."""
    assert request.id is not None
    job = client.wait(request.id, timeout_s=TIMEOUT_S)
    assert job.result is not None
    assert job.result.prompt_logprobs is not None
    first, *rest = job.result.prompt_logprobs
    assert first is None
    found = [one for one in rest if one is not None]
    assert job.prompt_token_ids is not None
    assert [one.token_id for one in found] == list(job.prompt_token_ids[1:])
    return found


def asked(**fields: Any) -> JobRequest:
    usual = {**FIELDS, "id": new_id(), "max_tokens": 2, "prompt_logprobs": NUM_TOP}
    return JobRequest(**{**usual, **fields})


def test_every_door_takes_the_field_and_gives_the_same(stack: Stack, client: Client) -> None:
    producer = Producer(urls=stack.urls, api_key=stack.urls["api_key"], model=NAME)
    requests = {door: asked() for door in DOORS}

    for door, request in requests.items():
        DOORS[door](producer, [request])

    found = {door: of(client, request) for door, request in requests.items()}
    assert all(one == found["client"] for one in found.values())
    assert all(len(one.top) == NUM_TOP for one in found["client"])
    assert found["client"][-2].rank == 1, "the prompt repeats itself"


def test_openais_client_gets_them_in_both_forms(openai: OpenAI, client: Client) -> None:
    request = asked()
    client.submit_many([request])
    expected = of(client, request)

    echoed = openai.completions.create(**FIELDS, max_tokens=3, echo=True, logprobs=NUM_TOP, n=2)

    for choice in echoed.choices:
        logprobs = choice.logprobs
        assert choice.text.startswith(PROMPT)
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert "".join(logprobs.tokens) == choice.text
        assert logprobs.token_logprobs is not None
        told = logprobs.token_logprobs[: len(expected) + 1]
        assert told == [None, *(one.logprob for one in expected)]
    messages: Any = [{"role": "user", "content": "Hi"}]
    chat = openai.chat.completions.create(
        model=NAME, messages=messages, max_tokens=2, extra_body={"prompt_logprobs": 1}
    )
    assert chat.model_extra is not None
    first, *rest = chat.model_extra["prompt_logprobs"]
    assert first is None
    assert all({"logprob", "rank", "decoded_token"} == {*next(iter(one.values()))} for one in rest)
    with pytest.raises(BadRequestError, match="stream"):
        openai.completions.create(**FIELDS, echo=True, logprobs=1, stream=True)
    with pytest.raises(BadRequestError, match="32768"):
        openai.completions.create(
            **{**FIELDS, "prompt": [5] * 1600}, extra_body={"prompt_logprobs": 20}
        )


def test_they_are_the_same_after_the_stages_were_killed(stack: Stack, client: Client) -> None:
    calm = asked()
    client.submit_many([calm])
    expected = of(client, calm)
    request = asked(max_tokens=200, ignore_eos=True)
    client.submit_many([request])
    assert request.id is not None
    next(iter(client.stream(request.id)))

    for name, pid in stack.look()["processes"].items():
        if name.startswith("stage"):
            psutil.Process(pid).kill()

    assert of(client, request) == expected
