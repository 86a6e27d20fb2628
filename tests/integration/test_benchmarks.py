"""The benchmarks' own pipeline, as `make bench-peers` and `make bench-gpu` start it, on models that
are small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.benchmarks.peers.shardline import Shardline
from tests.pinned import own_cores
from tests.repository import REPOSITORY
from tests.tiny_head import CLERK

WORK = {"prompts": [[5, 6, 7], [8, 9]], "new_tokens": 4, "arrivals_s": [0.0, 0.0]}


@pytest.mark.parametrize("precision", Shardline.precisions)
def test_our_runner_serves_in_each_precision(precision: str) -> None:
    command = Shardline("core-0", lambda _: CLERK).command(precision)
    lines: list[Any] = [{**command.settings, "kv_bytes": 64 << 20}, WORK]
    said = subprocess.run(
        command.argv,
        cwd=REPOSITORY,
        input=b"\n".join(map(msgspec.json.encode, lines)),
        capture_output=True,
        check=True,
    ).stdout
    ready, record = map(msgspec.json.decode, said.splitlines())
    assert "shardline" in ready["ready"]
    assert [len(ids) for ids in record["ids"]] == [4, 4]


def test_the_benchmark_of_gpus_runs_what_a_device_can_and_names_the_rest(tmp_path: Path) -> None:
    found = bench_gpu("toy:0", tmp_path)

    assert [figure["name"] for figure in found["figures"]] == ["base", "chain"]
    assert all(figure["value"] > 0 for figure in found["figures"])
    refused = "SHARDLINE_GPU_PRODUCTS: triton cannot compute on toy:0: triton does not serve toy"
    assert found["skipped"]["products-triton"].startswith(refused)
    assert found["skipped"]["graphs"].startswith("SHARDLINE_CUDA_GRAPHS: toy:0 is no CUDA device")
    assert found["skipped"].keys() == {
        "products-triton",
        "graphs",
        "products-triton-graphs",
        "attention-sdpa",
    }
    assert found["device"] == "test accelerator 0"


def bench_gpu(device: str, folder: Path) -> Any:
    """What it wrote."""
    output = folder / "gpu.json"
    argv = [
        sys.executable,
        "-m",
        "tests.benchmarks.gpu",
        "--device",
        device,
        "--core",
        f"cpu:{own_cores()[0]}",
    ]
    argv += ["--size", "tiny", "--prompts", "2", "--rounds", "1", "--kv-mib", "1"]
    argv += ["--cache", str(folder), "--output", str(output)]
    environment = os.environ | {"SHARDLINE_DEVICE_MODULE": "tests.accelerator"}
    subprocess.run(argv, cwd=REPOSITORY, env=environment, check=True)
    return json.loads(output.read_text())
