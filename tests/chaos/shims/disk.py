"""A disk that is full under one folder, for processes that preload a library. Knows no server;
needs a C compiler."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

from tests.chaos.shims.shim import build

SOURCE = Path(__file__).with_suffix(".c")
STATE_BYTES = 4096
COUNTER = struct.Struct("l")


class Disk:
    """For processes that are started with `environment` and preload `library`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._state = folder / "state"
        self._state.write_bytes(bytes(STATE_BYTES))
        self.library = folder / "disk.so"
        self.why_not = build(SOURCE, self.library)
        """None, or why there is no such library here."""

    @property
    def environment(self) -> Mapping[str, str]:
        """What tells the library where its state is."""
        return {"TEST_DISK_STATE": str(self._state)}

    @property
    def num_refused(self) -> int:
        """Writes, by all processes, since this disk was made."""
        (number,) = COUNTER.unpack(self._state.read_bytes()[: COUNTER.size])
        return int(number)

    def fill(self, folder: Path) -> None:
        """Nothing more can be written to files under this folder."""
        path = f"{folder.resolve()}/".encode()
        # The first character is what processes look at: it comes last.
        self._write(COUNTER.size + 1, path[1:] + b"\0")
        self._write(COUNTER.size, path[:1])

    def free(self) -> None:
        """There is room again, everywhere."""
        self._write(COUNTER.size, b"\0")

    def _write(self, place: int, data: bytes) -> None:
        with self._state.open("r+b") as file:
            file.seek(place)
            file.write(data)
