"""`make bench`: every figure, as ratios of runs that alternate in this one session.

python -m tests.benchmarks [--only NAME …] [--runs 3] [--reference FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.standalone.preload import mimalloc
from tests.benchmarks.model import make, make_copier
from tests.benchmarks.report import Figure, compare, save, show

CACHE = Path.home() / ".cache" / "shardline-bench"
DTYPES = ("bfloat16", "float32")
TWO = ("--device", "cpu:0", "--device", "cpu:1")
ONE = ("--device", "cpu:0-1")


def main() -> int:
    """Runs the chosen groups, prints a table, writes results/latest.json. Non-zero when a target is
    missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=sorted(GROUPS), default=sorted(GROUPS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--reference", help="folder of the executor that decode_step is compared with"
    )
    options = parser.parse_args()
    figures: list[Figure] = []
    for name in options.only:
        print(f"-- {name}", flush=True)
        figures += GROUPS[name](options)
        save(figures)
    show(figures)
    return 0 if all(figure.is_met is not False for figure in figures) else 1


def call(module: str, *arguments: str) -> tuple[dict[str, Any], str]:
    """One benchmark in a process of its own: its JSON line, and the command."""
    argv = ["-m", f"tests.benchmarks.{module}", *arguments]
    # The bare engine gets the allocator that the launcher gives to stages; transformers runs as it
    # comes.
    environment = os.environ | (
        {"LD_PRELOAD": mimalloc()} if module in ("bare", "decode_step") else {}
    )
    done = subprocess.run(
        [sys.executable, *argv], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    print("  ", done.stdout.strip().splitlines()[-1], flush=True)
    return json.loads(done.stdout.strip().splitlines()[-1]), f"python {' '.join(argv)}"


def service(options: argparse.Namespace) -> list[Figure]:
    """The whole service beside the bare engine, on two stages."""
    figures = []
    for dtype in DTYPES:
        model = str(make(CACHE, dtype))
        ours = []
        bare = []
        command = ""
        for _ in range(options.runs):
            bare += call("bare", "--model", model, "--dtype", dtype, *TWO, "--runs", "1")[0][
                "tokens_per_s"
            ]
            run, command = call("service", "--model", model, "--dtype", dtype, "--runs", "1")
            ours += run["tokens_per_s"]
        target = ">= 0.90"
        figures.append(
            compare(
                f"service-{dtype}",
                ours,
                bare,
                peer="bare engine",
                unit="tokens/s",
                target=target,
                command=command,
            )
        )
        figures += _beside_hf(dtype, model, ours)
    return figures


def _beside_hf(dtype: str, model: str, ours: Sequence[float]) -> list[Figure]:
    batches, command = call("hf", "--model", model, "--dtype", dtype, "--batch", "32")
    alone, alone_command = call(
        "hf", "--model", model, "--dtype", dtype, "--batch", "1", "--prompts", "8"
    )
    tasks, tasks_command = call("textbook", "--model", model, "--dtype", dtype, "--prompts", "8")
    target = {"bfloat16": ">= 2.2", "float32": ">= 3.5"}[dtype]
    rows = (
        ("static-batches", batches, "HF generate, batches of 32", target, command),
        ("one-by-one", alone, "HF generate, one by one", ">= 12", alone_command),
        ("textbook", tasks, "one Celery task per prompt", "", tasks_command),
    )
    return [
        compare(
            f"service-beside-{name}-{dtype}",
            ours,
            run["tokens_per_s"],
            peer=peer,
            unit="tokens/s",
            target=target,
            command=command,
        )
        for name, run, peer, target, command in rows
    ]


def stages(options: argparse.Namespace) -> list[Figure]:
    """Two stages of one core each beside one stage of two, bare: equal seats, and equal rows per
    lane."""
    figures = []
    for dtype in DTYPES:
        common = ("--model", str(make(CACHE, dtype)), "--dtype", dtype, "--runs", "1")
        two = []
        one = []
        double = []
        shares = []
        command = ""
        for _ in range(options.runs):
            run, command = call("bare", *common, *TWO)
            two += run["tokens_per_s"]
            shares.append(run["bubble_share"])
            one += call("bare", *common, *ONE)[0]["tokens_per_s"]
            double += call("bare", *common, *TWO, "--seats", "128", "--prompts", "128")[0][
                "tokens_per_s"
            ]
        rows = (("equal-seats", two, ">= 0.92"), ("equal-rows-per-lane", double, ">= 0.97"))
        figures += [
            compare(
                f"two-stages-{name}-{dtype}",
                ours,
                one,
                peer="one stage on both cores",
                unit="tokens/s",
                target=target,
                command=command,
            )
            for name, ours, target in rows
        ]
        figures += _bubbles(dtype, shares, command)
    return figures


def _bubbles(dtype: str, runs: Sequence[Sequence[float]], command: str) -> list[Figure]:
    return [
        Figure(
            name=f"bubble-share-stage-{place}-{dtype}",
            value=round(statistics.median(shares), 3),
            unit="of its time",
            target="<= 0.08",
            command=command,
        )
        for place, shares in enumerate(zip(*runs, strict=True))
    ]


def prefix(options: argparse.Namespace) -> list[Figure]:
    """Prompts with 512 tokens in common, the bare engine with the prefix cache beside itself
    without."""
    figures = []
    for dtype in DTYPES:
        common = (
            "--model",
            str(make(CACHE, dtype)),
            "--dtype",
            dtype,
            "--runs",
            "1",
            "--common",
            "512",
            *TWO,
        )
        ours = []
        without = []
        command = ""
        for _ in range(options.runs):
            run, command = call("bare", *common)
            ours += run["tokens_per_s"]
            without += call("bare", *common, "--no-prefix-cache")[0]["tokens_per_s"]
        figures.append(
            compare(
                f"common-head-{dtype}",
                ours,
                without,
                peer="without prefix cache",
                unit="tokens/s",
                target=">= 1.5",
                command=command,
            )
        )
    return figures


def lookup(options: argparse.Namespace) -> list[Figure]:
    """Prompt lookup beside itself switched off: one request that copies, alone, and workload W."""
    figures = []
    for dtype in DTYPES:
        copier = str(make_copier(CACHE, dtype))
        common = ("--dtype", dtype, "--runs", "1", *TWO)
        rows = (
            (
                "copying-alone",
                ("--model", copier, "--copy", "--prompts", "1", "--seats", "16"),
                ">= 1.5",
            ),
            ("w", ("--model", str(make(CACHE, dtype))), ">= 0.98"),
        )
        for name, work, target in rows:
            ours = []
            without = []
            command = ""
            for _ in range(options.runs):
                run, command = call("bare", *work, *common)
                ours += run["tokens_per_s"]
                without += call("bare", *work, *common, "--prompt-lookup", "0")[0]["tokens_per_s"]
            figures.append(
                compare(
                    f"lookup-{name}-{dtype}",
                    ours,
                    without,
                    peer="without prompt lookup",
                    unit="tokens/s",
                    target=target,
                    command=command,
                )
            )
    return figures


def step(options: argparse.Namespace) -> list[Figure]:
    """One decode step beside the reference, and what the scheduler takes of it."""
    arguments = ["--reference", options.reference] if options.reference else []
    run, command = call("decode_step", "--model", str(make(CACHE, "bfloat16")), *arguments)
    ours = run["ours_ms"]
    figures = [
        compare(
            "scheduler-share",
            run["scheduler_ms"],
            ours,
            peer="whole step",
            unit="ms",
            target="<= 0.03",
            command=command,
        )
    ]
    if run["reference_ms"]:
        reference = run["reference_ms"]
        figures.append(
            compare(
                "decode-step",
                ours,
                reference,
                peer="reference",
                unit="ms",
                target="<= 1.2",
                command=command,
            )
        )
    return figures


def memory(_options: argparse.Namespace) -> list[Figure]:
    """A stage's PSS beside imports + 1.15 x weights + KV."""
    figures = []
    for dtype in DTYPES:
        run, command = call("memory", "--model", str(make(CACHE, dtype)), "--dtype", dtype)
        value = max(run["pss_mib"])
        figures.append(
            Figure(
                name=f"stage-memory-{dtype}",
                value=round(value, 1),
                unit="MiB",
                peer="imports + 1.15 x weights + KV",
                peer_value=round(value / run["ratio"], 1),
                ratio=round(run["ratio"], 3),
                target="<= 1.0",
                command=command,
            )
        )
    return figures


def doors(_options: argparse.Namespace) -> list[Figure]:
    """Jobs/s accepted while the stages are idle."""
    run, command = call("doors")
    rows = (
        ("submit-many", "submit_many_jobs_per_s", ">= 1000"),
        ("submit-http", "http_jobs_per_s", ">= 200"),
    )
    return [
        Figure(
            name=name,
            value=round(statistics.median(run[key]), 1),
            unit="jobs/s",
            target=target,
            command=command,
        )
        for name, key, target in rows
    ]


def structured(options: argparse.Namespace) -> list[Figure]:
    """Rows held to a schema beside free ones, on the real model: alone, where forced tokens are
    drafts, and in a batch, where masks cost time."""
    run, command = call("structured", "--runs", str(options.runs))
    rows = (
        ("structured-json-alone", "json_alone", "free_alone", ">= 1.2"),
        ("structured-masks-batch", "prose_batch", "free_batch", ">= 0.95"),
        ("structured-json-batch", "json_batch", "free_batch", ">= 0.95"),
    )
    return [
        compare(
            name,
            run[ours],
            run[theirs],
            peer="free text",
            unit="tokens/s",
            target=target,
            command=command,
        )
        for name, ours, theirs, target in rows
    ]


GROUPS = {
    "doors": doors,
    "lookup": lookup,
    "memory": memory,
    "prefix": prefix,
    "service": service,
    "stages": stages,
    "step": step,
    "structured": structured,
}

if __name__ == "__main__":
    sys.exit(main())
