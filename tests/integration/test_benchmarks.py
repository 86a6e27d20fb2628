"""The benchmarks' own pipeline, started as `make bench-peers` starts it, on a model that is small."""

from __future__ import annotations

import subprocess
from typing import Any

import msgspec
import pytest

from tests.benchmarks.peers.shardline import Shardline
from tests.repository import REPOSITORY
from tests.tiny_head import CLERK

WORK = {"prompts": [[5, 6, 7], [8, 9]], "new_tokens": 4, "arrivals_s": [0.0, 0.0]}


@pytest.mark.parametrize("precision", Shardline.precisions)
def test_our_runner_serves_in_each_precision(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.benchmarks.peers.shardline.model", lambda _: CLERK)
    command = Shardline("core-0").command(precision)
    lines: list[Any] = [{**command.settings, "kv_bytes": 64 << 20}, WORK]
    said = subprocess.run(
        command.argv, cwd=REPOSITORY, input=b"\n".join(map(msgspec.json.encode, lines)), capture_output=True, check=True
    ).stdout
    ready, record = map(msgspec.json.decode, said.splitlines())
    assert "shardline" in ready["ready"]
    assert [len(ids) for ids in record["ids"]] == [4, 4]
