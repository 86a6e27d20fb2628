"""What tests of a module's own `stack` look at it with, and the stack that some of them share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers as tf
from openai import OpenAI
from sqlalchemy import Engine

from shardline.client import Client
from shardline.store.connection.database import connect
from tests.real_model import NAME, real_model
from tests.stack import ForkedStack, Stack


@pytest.fixture(scope="package")
def real_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """With a chat model with trained weights, in float32, and failpoints. Each test leaves it
    whole; tests/conftest.py has one process run all files that ask for it."""
    failpoints = tmp_path_factory.mktemp("failpoints")
    settings = {
        "SHARDLINE_MODEL": str(real_model()),
        "SHARDLINE_MODEL_NAME": NAME,
        "SHARDLINE_FAILPOINTS": str(failpoints),
    }
    stack = ForkedStack(tmp_path_factory.mktemp("real"), **settings)
    stack.start()
    yield stack
    stack.end()
    assert stack.left() == []


@pytest.fixture(scope="package")
def reference() -> tf.PreTrainedModel:
    """The model of `real_stack` by transformers, in float32."""
    return tf.AutoModelForCausalLM.from_pretrained(real_model(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def database(stack: Stack) -> Iterator[Engine]:
    engine = connect(stack.urls["database"])
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[Client]:
    with Client(database_url=stack.urls["database"], redis_url=stack.urls["redis"]) as client:
        yield client


@pytest.fixture(scope="module")
def openai(stack: Stack) -> Iterator[OpenAI]:
    """Patient: tests kill the gateway."""
    url = f"{stack.urls['gateway']}/v1"
    with OpenAI(base_url=url, api_key=stack.urls["api_key"], max_retries=20) as openai:
        yield openai
