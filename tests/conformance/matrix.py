"""What the matrix of exact rows runs over, and how a cell is run. Knows no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ISAS = {
    "AVX2": "avx2",
    "AVX512_CORE": "avx512bw",
    "AVX512_CORE_BF16": "avx512_bf16",
    "AVX10_1_512_AMX": "amx_bf16",
}
"""As oneDNN names them, and the processor's flag for each."""
MODELS = ("clerk", "wide")
DTYPES = ("bfloat16", "float32", "int8", "int4")
THREADS = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Of one number of stages."""

    stages: int
    jobs: int
    exact: bool
    changed: dict[str, int]

    @property
    def is_held(self) -> bool:
        """Nothing changed, or nothing was promised."""
        return not self.exact or not any(self.changed.values())

    def __str__(self) -> str:
        changed = ", ".join(map(str, self.changed.values()))
        return f"{self.stages:>6} {self.jobs:>4}  {str(self.exact).lower():<6} {changed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One process."""

    isa: str
    model: str
    dtype: str
    threads: int

    def verdicts(
        self, *, prompts: int, stages: Sequence[int], cores: Sequence[int] | None = None
    ) -> Iterator[Verdict]:
        """Runs it, by default on the first cores that there are; as its answers come."""
        names = ",".join(map(str, cores or usable_cores()[: self.threads]))
        options = {"model": self.model, "dtype": self.dtype, "cores": names, "prompts": prompts}
        argv = [sys.executable, "-m", "tests.conformance.cell", "--stages", *map(str, stages)]
        argv += [part for name, value in options.items() for part in (f"--{name}", str(value))]
        environment = os.environ | {"ONEDNN_MAX_CPU_ISA": self.isa}
        with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    yield Verdict(**json.loads(line))
        assert process.returncode == 0, f"{self} ended with status {process.returncode}"


def usable_cores() -> list[int]:
    """Those that this process may use."""
    return sorted(os.sched_getaffinity(0))


def offered_isas() -> list[str]:
    """Those that this processor has, the least first."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    return [name for name, flag in ISAS.items() if flag in flags]
