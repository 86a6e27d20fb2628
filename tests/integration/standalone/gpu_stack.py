"""A stage on a GPU alone: by default its rows are exact, also after a kill. `make test-gpu` runs it
by its name, `make test` does not."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from shardline.client import Client
from tests.stack import Stack

GPU = os.environ["SHARDLINE_TEST_DEVICE"]
PARAMS: dict[str, Any] = {"max_tokens": 128, "temperature": 0, "ignore_eos": True}


def test_a_gpu_that_is_exact_gives_the_same_tokens_after_a_kill(tmp_path: Path) -> None:
    # Given a stage on the GPU alone, which replays its steps
    stack = Stack(tmp_path, SHARDLINE_DEVICES=GPU)
    sampled = {**PARAMS, "temperature": 1, "seed": 5}
    prompt = list(range(5, 60))
    stack.start()
    try:
        with Client(database_url=stack.urls["database"], redis_url=stack.urls["redis"]) as client:
            whole = client.wait([client.submit("clerk", prompt, **sampled)], 120)[0].result

            # When it is killed while it generates beside others
            crowd = [client.submit("clerk", [5 + each, 9], **PARAMS) for each in range(20)]
            job = client.submit("clerk", prompt, **sampled)
            next(iter(client.stream(job)))
            os.kill(stack.look()["processes"]["stage-0"], signal.SIGKILL)
            assert client.get(job).result is None, "the kill came too late"
            found = client.wait([job, *crowd], 120)[0].result
    finally:
        stack.end()

    # Then the row is the same, and says so
    assert "are not recorded" not in (tmp_path / "logs" / "stage-0.log").read_text()
    assert whole is not None
    assert found is not None
    assert whole.exact
    assert found.exact
    assert found.token_ids == whole.token_ids
