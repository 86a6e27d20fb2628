"""What a stage weighs after warm-up, beside what it must: its imports, its weights, its KV budget.

python -m tests.benchmarks.memory --model DIR --dtype float32
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import psutil
from safetensors import safe_open

from shardline.client import Client
from tests.benchmarks.service import run, stack
from tests.benchmarks.workload import workload

KV_MIB = 512
MIB = 2**20
IMPORTS = "import services.stage.__main__, psutil; print(psutil.Process().memory_full_info().pss)"


def main() -> None:
    """Prints MiB of each stage as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    imports = int(subprocess.check_output([sys.executable, "-c", IMPORTS])) / MIB
    with (
        stack(options.model, options.dtype, 2, SHARDLINE_KV_MIB=str(KV_MIB)) as up,
        Client(database_url=up["urls"]["database"], redis_url=up["urls"]["redis"]) as client,
    ):
        run(client, up["model"], workload())
        stages = [
            psutil.Process(up["processes"][name]).memory_full_info().pss / MIB
            for name in ("stage-0", "stage-1")
        ]
    weights = [size / MIB for size in weights_of(Path(options.model))]
    ratios = [
        pss / (imports + 1.15 * size + KV_MIB) for pss, size in zip(stages, weights, strict=True)
    ]
    print(
        json.dumps(
            {
                "pss_mib": stages,
                "imports_mib": imports,
                "weights_mib": weights,
                "ratio": max(ratios),
            }
        )
    )


def weights_of(folder: Path) -> tuple[int, int]:
    """Bytes of the first and second half of the layers; the tied embedding is on both."""
    first = second = 0
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = list(file.keys())
        num_layers = 1 + max(
            int(name.split(".")[2]) for name in names if name.startswith("model.layers.")
        )
        for name in names:
            size = file.get_tensor(name).nbytes
            layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
            if layer is None or layer < num_layers // 2:
                first += size
            if layer is None or layer >= num_layers // 2:
                second += size
    return first, second


if __name__ == "__main__":
    main()
