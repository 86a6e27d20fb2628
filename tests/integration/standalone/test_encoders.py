"""Encoders behind the whole service: the same vectors at every door and after a stage was killed,
and errors that name the model's task."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import numpy as np
import psutil
import pytest
import redis
import torch
import transformers as tf
from celery import Celery
from openai import BadRequestError, OpenAI
from openai.types import Batch
from sqlalchemy import Engine, text

from shardline.client import Client
from shardline.contract import keys
from shardline.contract.queues import INTAKE_QUEUE, SUBMIT_TASK
from shardline_server.tokenize import Tokens
from shardline_server.tokenize.folder import model_row
from tests.encoders import save_encoder
from tests.models import VOCAB_SIZE
from tests.polling import until
from tests.stack import ForkedStack, Stack

NAME = "tiny"
LONGEST = 128
LEAST_COSINE = 0.99999
TEXTS = ("w9", "w10 w11 w12 w13", "w14 " * 100)
NUM_KILLED = 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("models"), "bert")


@pytest.fixture(scope="module")
def stack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {"SHARDLINE_MODEL": str(model), "SHARDLINE_MODEL_NAME": NAME}
    stack = ForkedStack(tmp_path_factory.mktemp("encoder"), **settings, SHARDLINE_STAGES="2")
    stack.start()
    yield stack
    stack.end()
    assert stack.left() == []


def expected(model: Path, texts: tuple[str, ...]) -> list[np.ndarray[Any, Any]]:
    """By transformers, each text alone."""
    row = model_row(
        model, name=NAME, fingerprint="f", context_length=LONGEST, vocab_size=VOCAB_SIZE, eos_ids=()
    )
    tokens = Tokens.from_row(row)
    whole = tf.AutoModel.from_pretrained(model).eval()
    with torch.inference_mode():
        states = [
            whole(
                input_ids=torch.tensor(
                    [tokens.encode(each, field="input", add_special_tokens=True)]
                )
            ).last_hidden_state[0]
            for each in texts
        ]
    return [torch.nn.functional.normalize(each.mean(0), dim=0).numpy() for each in states]


def bits(vectors: Any) -> list[bytes]:
    return [np.array(each, dtype="<f4").tobytes() for each in vectors]


def test_openais_client_gets_the_vectors_of_transformers(openai: OpenAI, model: Path) -> None:
    packed = openai.embeddings.create(model=NAME, input=list(TEXTS))
    plain = openai.embeddings.create(model=NAME, input=list(TEXTS), encoding_format="float")

    found = [each.embedding for each in packed.data]
    assert bits(found) == bits(each.embedding for each in plain.data)
    assert [each.index for each in packed.data] == [0, 1, 2]
    for one, other in zip(found, expected(model, TEXTS), strict=True):
        assert np.dot(np.array(one), other) >= LEAST_COSINE
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == sum((3, 6, 102))
    ids = openai.embeddings.create(model=NAME, input=[[3, 9, 4], [3, 10, 11, 12, 13, 4]])
    assert bits(each.embedding for each in ids.data) == bits(found[:2])
    alone = openai.embeddings.create(model=NAME, input=[3, 9, 4])
    assert bits(each.embedding for each in alone.data) == bits(found[:1])


def test_every_door_has_the_same_vector(stack: Stack, client: Client, database: Engine) -> None:
    (wanted,) = client.embed(NAME, TEXTS[1:2], timeout_s=120)
    ids = [uuid4() for _ in range(2)]
    request = {"model": NAME, "prompt": TEXTS[1]}
    with redis.Redis.from_url(stack.urls["redis"]) as producer:
        producer.xadd(keys.INTAKE, {"request": json.dumps({"id": str(ids[0]), **request})})
    app = Celery(broker=stack.urls["redis"])
    app.send_task(SUBMIT_TASK, kwargs=request, task_id=str(ids[1]), queue=INTAKE_QUEUE)
    with database.begin() as connection:
        insert = text("INSERT INTO jobs (model, prompt) VALUES (:model, :prompt) RETURNING id")
        ids.append(connection.scalars(insert, request).one())
    until(lambda: len(client.get_many(ids)) == len(ids))
    client.wait(ids, timeout_s=120)

    with database.begin() as connection:
        query = text("SELECT embedding, text FROM results WHERE job_id = ANY(:ids)")
        rows = connection.execute(query, {"ids": ids}).all()
    assert [row.text for row in rows] == [""] * len(ids)
    assert bits(row.embedding for row in rows) == bits([wanted]) * len(ids)


def test_lines_of_a_batch_have_the_same_vectors(openai: OpenAI) -> None:
    asked: list[dict[str, Any]] = [
        {"input": list(TEXTS)},
        {"input": TEXTS[1], "encoding_format": "base64"},
        {"input": [[3, 9, 4], [3, 10, 11, 12, 13, 4]]},
        {"input": ["w9", ""]},
        {"input": "w9", "dimensions": 8},
    ]
    lines = [
        {"custom_id": f"{place}", "method": "POST", "url": "/v1/embeddings",
         "body": {"model": NAME, **body}}
        for place, body in enumerate(asked)
    ]  # fmt: skip
    content = "\n".join(map(json.dumps, lines)).encode()
    file = openai.files.create(file=("in.jsonl", content), purpose="batch")
    created = openai.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    )
    batch = until(lambda: ended(openai, created.id))
    assert batch is not None

    answers = read_lines(openai, batch.output_file_id)
    alone = [openai.post("/embeddings", body={"model": NAME, **each}, cast_to=object)
             for each in asked[:3]]  # fmt: skip
    bodies = [each["response"]["body"] for each in answers]
    for found, expected in zip(bodies, alone, strict=True):
        assert {**found, "id": None} == {**cast(dict[str, Any], expected), "id": None}
    fields = [
        each["response"]["body"]["error"]["param"]
        for each in read_lines(openai, batch.error_file_id)
    ]
    assert fields == ["input[1]", "dimensions"]
    used = sum(each["usage"]["prompt_tokens"] for each in bodies)
    assert batch.usage is not None
    assert (batch.status, batch.usage.input_tokens) == ("completed", used)


def ended(openai: OpenAI, batch_id: str) -> Batch | None:
    batch = openai.batches.retrieve(batch_id)
    return None if batch.completed_at is None else batch


def read_lines(openai: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in openai.files.content(file_id).text.splitlines()]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/embeddings", {"input": "w9 " * 200}, "input"),
        ("/embeddings", {"input": ["w9", ""]}, "input[1]"),
        ("/embeddings", {"input": "w9", "dimensions": 8}, "dimensions"),
        ("/embeddings", {"input": "w9", "temperature": 0.5}, "temperature"),
        ("/chat/completions", {"messages": [{"role": "user", "content": "w9"}]}, "model"),
        ("/completions", {"prompt": "w9"}, "model"),
        ("/score", {"text_1": "w9", "text_2": "w9"}, "model"),
        ("/rerank", {"query": "w9", "documents": ["w9"]}, "model"),
    ],
)
def test_what_an_encoder_cannot_do_is_refused_by_name(
    openai: OpenAI, path: str, body: dict[str, Any], field: str
) -> None:
    with pytest.raises(BadRequestError) as refused:
        openai.post(path, body={"model": NAME, **body}, cast_to=object)
    assert refused.value.param == field
    assert field != "model" or "its task is embed" in refused.value.message


def test_a_text_is_cut_where_the_request_says_so(openai: OpenAI) -> None:
    cut = {"truncate_prompt_tokens": -1}
    found = openai.embeddings.create(model=NAME, input="w9 " * 200, extra_body=cut)
    assert found.usage.prompt_tokens == LONGEST


def test_vectors_are_the_same_after_a_stage_was_killed(stack: Stack, client: Client) -> None:
    texts = [" ".join(f"w{5 + at % 90}" for at in range(1, 1 + num % 90)) or "w7"
             for num in range(NUM_KILLED)]  # fmt: skip
    calm = bits(client.embed(NAME, texts, timeout_s=200))
    ids = client.submit_many([{"model": NAME, "prompt": each} for each in texts])
    stages = [pid for name, pid in stack.look()["processes"].items() if "stage" in name]
    until(lambda: any(job.result for job in client.get_many(ids)))
    for pid in stages:
        psutil.Process(pid).kill()

    jobs = client.wait(ids, timeout_s=400)

    assert bits(job.result and job.result.embedding for job in jobs) == calm
    assert all(job.result is not None and job.result.exact for job in jobs)
