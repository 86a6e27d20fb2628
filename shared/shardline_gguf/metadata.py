"""The metadata of one architecture in a GGUF header: its numbers, checked."""

from __future__ import annotations

import math
import struct
from typing import Any

from shardline_gguf.architecture import ANYTHING, KNOWN, Architecture
from shardline_gguf.gguf_header import GgufHeader
from shardline_gguf.refusal import refuse

SINGLE = struct.Struct("<f")


class Metadata:
    """Those of a header behind its architecture's name."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self.path = header.path
        self.name = architecture
        self._header = header

    def get(self, key: str) -> Any:
        """Returns a value as it is; None where the header has none."""
        return self._header.metadata.get(f"{self.name}.{key}")

    def in_header(self, key: str) -> Any:
        """Returns a value by its whole key; None where the header has none."""
        return self._header.metadata.get(key)

    def check_others(self, architecture: Architecture) -> None:
        """Raises Invalid for a key that the architecture does not have here, or one that says
        another thing than all its models: what is not applied must not change the answer."""
        constants = architecture.constants or {}
        own = {**architecture.sizes, **architecture.shares}
        prefix = f"{self.name}."
        for end in ("", "_swa"):
            lengths = [self.get(f"attention.{kind}_length{end}") for kind in ("key", "value")]
            if None not in lengths and lengths[0] != lengths[1]:
                refuse(
                    f"{self.path} has heads of {lengths[0]} in keys and {lengths[1]} in values",
                    "Give the model in safetensors",
                )
        for key in (each for each in self._header.metadata if each.startswith(prefix)):
            name, value = key.removeprefix(prefix), self._header.metadata[key]
            expected = constants.get(name, ANYTHING)
            if expected is not ANYTHING and not _equal(value, expected):
                refuse(
                    f"{self.path} has {key[:80]} {value!r}; read is {expected!r}",
                    "Give the model in safetensors",
                )
            if not (name in constants or name in own or name in KNOWN):
                refuse(
                    f"{self.path} has {key[:80]}, which is not applied",
                    "Give the model in safetensors",
                )

    def number(self, key: str, value: Any, *, skips_zeros: bool = False) -> int | float:
        """Returns the one number of a value: a file may list one for each layer, which must be
        equal, but for zeros of layers that have none, if these are skipped. Raises Invalid for
        another value."""
        values = value if isinstance(value, list) else [value]
        if skips_zeros:
            values = [each for each in values if each] or values
        first = values[0] if values else None
        if not isinstance(first, int | float) or any(each != first for each in values):
            refuse(f"{self.path} has {self.name}.{key} {values[:4]}, not one number")
        if not math.isfinite(first) or first < 0:
            refuse(f"{self.path} has {self.name}.{key} {first}")
        return decimal(first) if isinstance(first, float) else first


def _equal(value: Any, expected: object) -> bool:
    return bool(decimal(value) == expected if isinstance(value, float) else value == expected)


def decimal(value: float) -> float:
    """Returns the shortest decimal that single precision rounds to this value, as in the model's
    own config."""
    for digits in range(6, 9):
        short = float(f"{value:.{digits}g}")
        if SINGLE.pack(short) == SINGLE.pack(value):
            return short
    return float(value)
