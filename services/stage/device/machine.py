"""Identifies this machine, and lists all that libraries choose kernels by: equal lists, equal
bits."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path

import torch

ISA_PREFIXES = ("avx", "amx", "fma", "sse4", "asimd", "sve", "bf16", "i8mm")
PROCESSOR_FIELDS = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
"""Fields of /proc/cpuinfo apart from the instruction sets: kernels are chosen by processor
generation too."""
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
"""The caches of the first core: oneDNN sizes its blocks by them."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_CPU_ISA_HINTS",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_CPU_ISA_HINTS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
)
"""Settings of oneDNN, MKL and torch that change which kernel runs."""


def boot_id() -> str:
    """Returns the kernel's boot id: the same in all containers of a host, unlike their names."""
    return _text(BOOT_ID).strip() or socket.gethostname()


def machine() -> list[str]:
    """Returns libraries, processor, caches, and the settings that change which kernels run."""
    settings = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    return [torch.__version__, torch.__config__.show(), *settings, *_processor(), *_caches()]


def instruction_sets() -> list[str]:
    """Returns the processor's flags that kernels are chosen by, such as `avx2`, sorted."""
    fields = _fields()
    flags = {*fields.get("flags", "").split(), *fields.get("Features", "").split()}
    return sorted(flag for flag in flags if flag.startswith(ISA_PREFIXES))


def _processor() -> list[str]:
    fields = _fields()
    known = [f"{name}={fields[name]}" for name in PROCESSOR_FIELDS if name in fields]
    return [
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        *known,
        *instruction_sets(),
    ]


def _fields() -> dict[str, str]:
    """Returns what Linux reports of the first core."""
    lines = _text(Path("/proc/cpuinfo")).splitlines()
    return {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in reversed(lines))
    }


def _caches() -> list[str]:
    return [
        " ".join(
            _text(cache / name).strip() for name in ("level", "type", "size", "shared_cpu_list")
        )
        for cache in sorted(CACHES.glob("index*"))
    ]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
