"""Sets of cores as the names of devices write them, such as `cpu:0-3,5`. Knows no machine."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardline.base.errors import Invalid

FIELD = "SHARDLINE_DEVICE"
FORMS = (
    "Write cpu:0, cpu:0-3, cpu:0,2, cuda:0, xpu:0, mps, a GPU's UUID, "
    "a kind alone such as cpu or cuda, or auto"
)
PREFIX = "cpu:"
MAX_CORES = 4096


def parse_cores(name: str) -> tuple[int, ...]:
    """Returns the cores in a device's name: `cpu:0-3` → (0, 1, 2, 3). Raises Invalid if it is not
    such a name."""
    cores: set[int] = set()
    for part in name.removeprefix(PREFIX).split(","):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part)
        if match is None or not name.startswith(PREFIX):
            raise Invalid(FIELD, f"{name!r} is not a device", FORMS)
        first = int(match[1])
        last = int(match[2] or match[1])
        if not first <= last < MAX_CORES:
            raise Invalid(
                FIELD, f"{part!r} is not a range of cores (0-{MAX_CORES - 1}, first ≤ last)", FORMS
            )
        cores |= set(range(first, last + 1))
    return tuple(sorted(cores))


def show_cores(cores: Sequence[int]) -> str:
    """Formats cores as ranges: (0, 1, 2, 5) → `0-2,5`."""
    parts: list[list[int]] = []
    for core in cores:
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
