"""Clocks of single processes, moved by a preloaded library. Knows no service; needs a C
compiler."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

from tests.chaos.shims.shim import build

SOURCE = Path(__file__).with_suffix(".c")
SECONDS = struct.Struct("d")


class Clock:
    """For processes that are started with `environment` and preload `library`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.library = folder / "clock.so"
        self.why_not = build(SOURCE, self.library)
        """None, or why there is no such library here."""

    @property
    def environment(self) -> Mapping[str, str]:
        """What tells the library where shifts are."""
        return {"TEST_CLOCK_FOLDER": str(self._folder)}

    def has(self, pid: int) -> bool:
        """Whether the process has preloaded it."""
        return (self._folder / str(pid)).exists()

    def shift(self, pid: int, shift_s: float) -> None:
        """The process's clock jumps so far from the true time; 0 puts it right."""
        self._write(pid, 0, shift_s)

    def suspend(self, pid: int, suspended_s: float) -> None:
        """For the process, its machine has been suspended so long since it started."""
        self._write(pid, SECONDS.size, suspended_s)

    def _write(self, pid: int, place: int, seconds: float) -> None:
        with (self._folder / str(pid)).open("r+b") as file:
            file.seek(place)
            file.write(SECONDS.pack(seconds))
