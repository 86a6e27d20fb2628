"""How long this process's threads waited for a core that others had, by the kernel's scheduler.
Knows no device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TASKS = Path("/proc/self/task")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerTimes:
    """Holds the nanoseconds that this process's living threads have been on a core, and ready
    without one."""

    ran_ns: int
    waited_ns: int

    @classmethod
    def now(cls) -> SchedulerTimes:
        """Zeros where the kernel does not count them."""
        counts = [_counts(task / "schedstat") for task in TASKS.iterdir()]
        return cls(
            ran_ns=sum(ran for ran, _ in counts), waited_ns=sum(waited for _, waited in counts)
        )

    def waited_share(self, earlier: SchedulerTimes) -> float:
        """Returns the share of the time since then, 0 to 1, that threads could have run and others
        ran."""
        ran_ns = max(0, self.ran_ns - earlier.ran_ns)
        waited_ns = max(0, self.waited_ns - earlier.waited_ns)
        return waited_ns / (ran_ns + waited_ns) if waited_ns else 0.0


def _counts(path: Path) -> tuple[int, int]:
    try:
        ran, waited, _ = path.read_text(encoding="ascii").split()
    except (OSError, ValueError):  # the thread has ended, or there is no such file
        return 0, 0
    return int(ran), int(waited)
