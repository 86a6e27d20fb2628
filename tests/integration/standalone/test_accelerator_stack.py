"""A stack over a core and an accelerator gives the tokens of `generate`, also after kills of its
stages.

Each stage streams a layer, the one from a file, the other from the host's memory. The accelerator
is the test's own, unless SHARDLINE_TEST_DEVICE names a real one (`make test-gpu`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as tf

from services.standalone.cores import usable_cores
from services.standalone.settings import CLERK
from shardline.client import Client
from shardline.store import pipelines
from shardline.store.connection.database import connect
from tests.polling import until
from tests.stack import ForkedStack, Stack

GPU = os.environ.get("SHARDLINE_TEST_DEVICE")
DEVICES = (f"cpu:{usable_cores()[0]}", GPU or "toy:0")
NUM_NEW = 128
PARAMS: dict[str, Any] = {"max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    settings = {
        "DEVICES": " ".join(DEVICES),
        **({} if GPU else {"DEVICE_MODULE": "tests.accelerator"}),
        "STREAMED_LAYERS": "1",
        "KV_MIB": "2",  # the test accelerator copies a layer's KV for each operator on it
        "TIME_SCALE": "0.5",
        "CACHE_DIR": str(folder / "cache"),
    }
    named = {f"SHARDLINE_{name}": value for name, value in settings.items()}
    stack = ForkedStack(folder, **named)
    stack.start()
    yield stack
    stack.end()
    assert stack.left() == []


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, 90, (length,), generator=generator).tolist() for length in (3, 20, 70)]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Each prompt alone through transformers."""
    model = tf.AutoModelForCausalLM.from_pretrained(CLERK, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    wanted = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0}
    found = [
        model.generate(torch.tensor([prompt]), **wanted)[0, len(prompt) :] for prompt in prompts
    ]
    return [tuple(ids.tolist()) for ids in found]


@pytest.mark.parametrize("killed", [None, *DEVICES])
def test_its_jobs_end_once_with_the_tokens_of_generate(
    stack: Stack, prompts: list[list[int]], expected: list[tuple[int, ...]], killed: str | None
) -> None:
    with Client(database_url=stack.urls["database"], redis_url=stack.urls["redis"]) as client:
        ids = [client.submit("clerk", prompt, **PARAMS) for prompt in prompts]
        if killed is not None:
            next(iter(client.stream(ids[-1])))
            os.kill(stack.look()["processes"][places(stack)[killed]], signal.SIGKILL)
            assert client.get(ids[-1]).result is None, "the kill came too late"
        jobs = client.wait(ids, 120)
    assert [job.result.token_ids for job in jobs if job.result is not None] == expected
    # The test accelerator promises no bits, our kernels on a GPU do
    assert [job.result.exact for job in jobs if job.result is not None] == [GPU is not None] * 3
    until(lambda: tuple(places(stack)) == DEVICES, timeout_s=60)
    logs = [
        (stack.home.folder / "logs" / f"stage-{place}.log").read_text()
        for place in range(len(DEVICES))
    ]
    assert all("layers are streamed" in log for log in logs)


def places(stack: Stack) -> dict[str, str]:
    """The process of each device's stage, once the pipeline is ready."""
    database = connect(stack.urls["database"])
    with database.connect() as connection:
        ready = [each for each in pipelines.live_pipelines(connection) if each.ready]
    database.dispose()
    return {
        stage["device"]: f"stage-{place}"
        for each in ready
        for place, stage in enumerate(each.stages)
    }
