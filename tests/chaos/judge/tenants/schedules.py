"""Whether each time of a schedule has one job. Knows no server; each schedule fires every
minute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

from tests.chaos.judge.tenants.rows import Row
from tests.chaos.load.tenants.ledger import TimedSchedule

MINUTE = timedelta(minutes=1)


def broken_schedules(schedules: Sequence[TimedSchedule], jobs: Sequence[Row]) -> Iterator[str]:
    """Yields times with two jobs, and with none. A job is created at its time or a little later:
    no fault keeps all relays away for a whole minute."""
    for schedule in schedules:
        mine = [job for job in jobs if job["metadata"].get("schedule") == schedule.name]
        times = Counter(_minute(job["created_at"]) for job in mine)
        for time, num in times.items():
            if num > 1:
                yield f"schedule {schedule.name} has {num} jobs of {time}"
        for job in mine:
            if job["created_at"] < _minute(schedule.acknowledged_at):
                yield f"schedule {schedule.name} fired before it was made"
        if schedule.stop_asked_at is None:
            continue
        time = _minute(schedule.acknowledged_at) + MINUTE
        # Its last times may have come as it was deleted.
        while time + MINUTE <= schedule.stop_asked_at:
            if not times[time]:
                yield f"schedule {schedule.name} has no job of {time}"
            time += MINUTE


def _minute(moment: datetime) -> datetime:
    return moment.replace(second=0, microsecond=0)
