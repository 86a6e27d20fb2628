"""The wall clocks of single processes, shifted by a preloaded library. Knows no service; needs a C compiler."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


class Clock:
    """For processes that are started with `settings`, or with `library` among what they preload."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.library = folder / "clock.so"
        self.why_not = self._build()
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
        with (self._folder / str(pid)).open("r+b") as file:
            file.write(struct.pack("d", shift_s))

    def _build(self) -> str | None:
        compiler = shutil.which("cc")
        if compiler is None:
            return "no C compiler is installed, to build a library that shifts clocks"
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(self.library), str(SOURCE), "-ldl"]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        return (
            None if built.returncode == 0 else f"the library that shifts clocks cannot be built: {built.stderr[-300:]}"
        )
