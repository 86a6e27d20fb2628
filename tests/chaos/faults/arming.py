"""Arms failpoints of running processes and hears when they struck. Knows no stack and no fault."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from shardline_server.failpoints import ArmedPoint, Point
from tests.polling import within

STRIKE_S = 180.0
"""Every point is passed within this time on a stack that has work, or never."""


class NeverStruck(Exception):
    """Nobody passed the armed point in time."""


class Arming:
    """A point armed in `folder`; as a context it is disarmed at the end."""

    def __init__(self, folder: Path, point: Point, armed: ArmedPoint) -> None:
        self._path = folder / point
        self._before = set(self._marks())
        draft = self._path.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(armed))
        draft.rename(self._path)

    @property
    def num_strikes(self) -> int:
        """So far."""
        return len(set(self._marks()) - self._before)

    @property
    def pids(self) -> list[int]:
        """Of the processes that it struck so far."""
        return [
            int(mark.suffixes[-2][1:].partition("-")[0])
            for mark in set(self._marks()) - self._before
        ]

    def wait(self, num_strikes: int = 1, *, timeout_s: float = STRIKE_S) -> None:
        """Until it struck so often. Raises NeverStruck, then disarmed."""
        if not within(timeout_s, lambda: self.num_strikes >= num_strikes, look_s=0.02):
            self.disarm()
            raise NeverStruck(
                f"{self._path.name}: {self.num_strikes} strikes within {timeout_s:g} s"
            )

    def disarm(self) -> None:
        """Whatever passes from now on is safe."""
        self._path.unlink(missing_ok=True)

    def _marks(self) -> list[Path]:
        return list(self._path.parent.glob(f"{self._path.name}.*.struck"))


def arm(
    folder: Path,
    point: Point,
    action: str = "kill",
    *,
    when: Mapping[str, str | int] | None = None,
    pause_s: float = 0.0,
    times: int | None = 1,
) -> Arming:
    """See `shardline_server.failpoints.Armed`. Refuses what a process would refuse."""
    says = {"action": action, "when": dict(when or {}), "pause_s": pause_s, "times": times}
    return Arming(folder, point, msgspec.convert(says, ArmedPoint))
