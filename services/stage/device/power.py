"""The power of one device: measured where its kernel or driver tells, else a public figure. Knows
no step and no job.

Owns the choice of a source and its name, which every result carries: `rapl`, `nvml`, `setting` or
`table`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

import structlog

from services.stage.device.device import Device, Meter
from services.stage.device.watts import Watts
from shardline.base.clock import monotonic_s

log = structlog.get_logger(__name__)

SAMPLE_S = 0.2
"""A meter is read at most so often: a step takes milliseconds."""
MAX_SHARE = 0.01
"""Of the time may go into readings: the engine waits for them, and a driver's may take longer than
SAMPLE_S."""


class Power(ABC):
    """What a device draws. `add` is for the engine's thread, all else for any."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.computed_j = self._computed_s = 0.0
        """Of all steps."""

    def add(self, compute_s: float) -> None:
        """Counts a step that the device has just computed in `compute_s`."""
        self._computed_s += compute_s
        self.computed_j += self._watts_now() * compute_s

    @property
    def watts(self) -> float:
        """What it has drawn while it computed, the mean of all steps; 0 before the first one."""
        return self.computed_j / self._computed_s if self._computed_s else 0.0

    @abstractmethod
    def _watts_now(self) -> float:
        """Returns what it draws while it computes."""

    @abstractmethod
    def drawn_j(self) -> float:
        """Returns the energy that the device has drawn since the stage began, idle time
        included."""


class NominalPower(Power):
    """Goes by figures: one number of watts while it computes, another while it does not."""

    def __init__(self, source: str, watts: Watts) -> None:
        super().__init__(source)
        self._watts = watts
        self._began_s = monotonic_s()

    def drawn_j(self) -> float:
        """Returns the energy of computing and of the rest of the time."""
        computed_j = self.computed_j
        idle_s = monotonic_s() - self._began_s - computed_j / self._watts.busy
        return computed_j + self._watts.idle * max(0.0, idle_s)

    def _watts_now(self) -> float:
        return self._watts.busy


class MeasuredPower(Power):
    """Goes by a meter: the mean power between its last two readings. A step that follows a pause
    pays the pause's mean."""

    def __init__(self, meter: Meter) -> None:
        super().__init__(meter.source)
        self._spent_j = meter.spent_j
        self._lock = threading.Lock()
        self._read_s = monotonic_s()
        self._next_s = self._read_s + SAMPLE_S
        self._watts = 0.0
        self._drawn_j = 0.0
        self._is_lost = False

    def drawn_j(self) -> float:
        """Returns what the meter has counted."""
        self._read()
        return self._drawn_j

    def _watts_now(self) -> float:
        self._read()
        return self._watts

    def _read(self) -> None:
        with self._lock:
            began_s = monotonic_s()
            if began_s < self._next_s:
                return
            elapsed_s = began_s - self._read_s
            spent_j = self._measure(elapsed_s)
            self._read_s = began_s
            ended_s = monotonic_s()
            self._next_s = ended_s + max(SAMPLE_S, (ended_s - began_s) / MAX_SHARE)
            self._watts = spent_j / elapsed_s
            self._drawn_j += spent_j

    def _measure(self, elapsed_s: float) -> float:
        """A meter that fails costs no step: its last power counts on."""
        try:
            return self._spent_j(elapsed_s)
        except Exception as error:  # noqa: BLE001 (a driver may raise anything)
            if not self._is_lost:
                self._is_lost = True
                log.warning(
                    "the power meter fails: its last value counts on",
                    source=self.source,
                    error=repr(error),
                )
            return self._watts * elapsed_s


def power_of(device: Device, watts: float | None) -> Power | None:
    """Returns the best source that there is; `watts` is what it draws according to an operator.
    None: unknown."""
    power, reason = _source_of(device, watts)
    if power is None:
        log.warning(
            "the power of this device is not known: set SHARDLINE_DEVICE_WATTS", device=device.name
        )
    else:
        log.info("power known", device=device.name, source=power.source, not_measured=reason)
    return power


def _source_of(device: Device, watts: float | None) -> tuple[Power | None, str | None]:
    """The source, and why it is no meter."""
    if watts is not None:
        return NominalPower("setting", Watts.of_board(watts)), "SHARDLINE_DEVICE_WATTS is set"
    try:
        meter = device.meter()
        reason = "it has no meter"
    except OSError as error:
        meter = None
        reason = str(error)
    if meter is not None:
        return MeasuredPower(meter), None
    figures = device.watts()
    return None if figures is None else NominalPower("table", figures), reason
