"""`make bench-gpu`: the bare engine on a GPU, one thing changed at a time, as ratios of runs that
alternate.

    python -m tests.benchmarks.gpu --device cuda:0 [--size 1b] [--rounds 3] [--only products-triton
    graphs]

Prints a table and writes a JSON file. A variant that the device refuses is skipped by name, with
the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from services.stage.device.accelerator import MODULE_FIELD, find, load_module
from services.stage.model.model_info import ModelInfo
from shardline.base.errors import Invalid
from tests.benchmarks.model import SIZES, make_sized
from tests.benchmarks.report import LATEST, Figure, compare, show

CACHE = Path.home() / ".cache" / "shardline-bench"
DTYPE = "bfloat16"
BASE = "base"
"""torch's products, attention through Triton, no graphs, all layers on the GPU."""
CHAIN = "chain"
SDPA = "attention-sdpa"
REFUSAL = f"{Invalid.__module__}.{Invalid.__name__}: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What differs from the base."""

    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


VARIANTS = {
    BASE: Variant(),
    "products-triton": Variant(arguments=("--gpu-products", "triton")),
    "graphs": Variant(arguments=("--cuda-graphs",)),
    "products-triton-graphs": Variant(arguments=("--gpu-products", "triton", "--cuda-graphs")),
    SDPA: Variant(environment={"SHARDLINE_KERNEL": "off"}),
    CHAIN: Variant(arguments=("--gpu-products", "auto")),
}


class Refused(Exception):
    """The device cannot run a variant."""


def main() -> int:
    """Runs all variants in turns; non-zero if the base cannot run."""
    options = parser().parse_args()
    load_module(os.environ.get(MODULE_FIELD))
    model = make_sized(options.cache, DTYPE, options.size)
    runs: dict[str, list[dict[str, Any]]] = {
        name: [] for name in VARIANTS if name in {BASE, *options.only}
    }
    skipped: dict[str, str] = {}
    for _ in range(options.rounds):
        for name, done in runs.items():
            if name in skipped:
                continue
            try:
                done.append(run(name, model, options))
            except Refused as error:
                skipped[name] = str(error)
            if name == BASE and SDPA in runs and done and done[0]["attention"] == "sdpa":
                skipped[SDPA] = "the base has no other attention on this device"
    figures = [figure(name, runs, options) for name in runs if name not in skipped and runs[BASE]]
    show(figures)
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}")
    write(options, figures, skipped)
    return 1 if BASE in skipped else 0


def parser() -> argparse.ArgumentParser:
    """Its options."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--device", default="cuda:0")
    options.add_argument(
        "--core", default="cpu:0", help="of the chain's first stage, which holds one layer"
    )
    options.add_argument("--size", choices=SIZES, default="1b")
    options.add_argument("--prompts", type=int, default=64)
    options.add_argument("--seats", type=int, default=64)
    options.add_argument("--token-budget", type=int, default=256, help="rows of a step")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--kv-mib", type=int, help="of each stage; default: as a stage decides it")
    options.add_argument("--only", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    options.add_argument("--cache", type=Path, default=CACHE, help="folder of the model")
    options.add_argument("--output", type=Path, default=LATEST.with_name("gpu.json"))
    return options


def run(name: str, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run of a variant in a process of its own: the line of JSON that it says. Raises
    Refused."""
    devices = [options.device]
    split = []
    if name == CHAIN:
        num_layers = ModelInfo.read(model).num_layers
        devices = [options.core, options.device]
        split = ["--split", f"0-0,1-{num_layers - 1}"]
    argv = [
        sys.executable,
        "-m",
        "tests.benchmarks.bare",
        "--model",
        str(model),
        "--dtype",
        DTYPE,
        "--runs",
        "1",
    ]
    argv += [part for device in devices for part in ("--device", device)] + split
    argv += ["--prompts", str(options.prompts), "--seats", str(options.seats)]
    argv += ["--token-budget", str(options.token_budget)]
    argv += ["--gpu-products", "torch", "--no-cuda-graphs", *VARIANTS[name].arguments]
    argv += ["--kv-bytes", str(options.kv_mib << 20)] if options.kv_mib else []
    done = subprocess.run(
        argv,
        env=os.environ | VARIANTS[name].environment,
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stderr.strip().splitlines()
    if done.returncode and said and said[-1].startswith(REFUSAL):
        raise Refused(said[-1].removeprefix(REFUSAL))
    if done.returncode:
        sys.stderr.write(done.stderr)
        done.check_returncode()
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"   {name}: {found['tokens_per_s'][0]:.1f} tokens/s", flush=True)
    return found


def figure(name: str, runs: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> Figure:
    """A variant beside the base."""
    ours = speeds(runs[name])
    base = speeds(runs[BASE])
    command = (
        f"python -m tests.benchmarks.gpu --device {options.device} --size {options.size}"
        f" --only {name}"
    )
    found = compare(name, ours, base, peer=BASE, unit="tokens/s", target="", command=command)
    note = f"attention {runs[name][0]['attention']}, exact {runs[name][0]['exact']}"
    return msgspec.structs.replace(found, note=note)


def speeds(runs: Sequence[dict[str, Any]]) -> list[float]:
    """Output tokens/s of each run."""
    return [speed for each in runs for speed in each["tokens_per_s"]]


def write(options: argparse.Namespace, figures: Sequence[Figure], skipped: dict[str, str]) -> None:
    """The figures with what they were measured on."""
    try:
        device = find(options.device).model()
    except Invalid as error:
        device = str(error)
    found = {
        "device": device,
        "model": f"llama-{options.size}-{DTYPE}",
        "figures": msgspec.to_builtins(figures),
        "skipped": skipped,
    }
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
