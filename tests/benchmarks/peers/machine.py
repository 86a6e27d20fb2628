"""What a figure was measured on: processor, instruction sets, cores, memory, the versions that took
part."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from typing import Any

import psutil

from tests.repository import REPOSITORY

SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8")


def describe() -> dict[str, Any]:
    """No name of the host."""
    said = fields(_output("lscpu"))
    flags = set(said.get("Flags", "").split())
    numbers = ("CPU family", "Model", "Stepping")
    return {
        "processor": f"{said.get('Model name', platform.processor())}"
        f" ({', '.join(f'{name.lower()} {said[name]}' for name in numbers if name in said)})",
        "instruction sets": ", ".join(name for name in SETS if name in flags),
        "cores": len(os.sched_getaffinity(0)),
        "caches": ", ".join(
            f"{name.removesuffix(' cache')} {said[name]}"
            for name in said
            if name.endswith(" cache")
        ),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "kernel": ".".join(platform.release().split(".")[:2]),
        "compiler": _output("gcc", "--version").splitlines()[0],
        "python": platform.python_version(),
        "commit": _output("git", "rev-parse", "--short", "HEAD").strip(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def fields(text: str) -> dict[str, str]:
    """`name: value` lines."""
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def _output(*argv: str) -> str:
    environment = os.environ | {"LC_ALL": "C"}
    return subprocess.run(
        argv, cwd=REPOSITORY, env=environment, check=True, capture_output=True, text=True
    ).stdout
