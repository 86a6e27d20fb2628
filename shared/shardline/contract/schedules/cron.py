"""When a schedule fires: cron expressions in time zones, as Debian's cron reads them. Knows no
clock: the caller gives the moment to start from.

A time that a zone's clocks pass over when they are put forward comes right after the gap; one that
comes twice when they are put back fires once, unless its hour or minute is `*`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from shardline.base.errors import Invalid
from shardline.contract.schedules.schedule_tables import MAX_CRON_CHARS

NUM_FIELDS = 5
REMEDY = "Write minute, hour, day of month, month, day of week: `0 7 * * MON-FRI`"
MAX_TIMES = 200
"""Of those that an expression names in one hour that a zone has twice."""


def next_time(cron: str, time_zone: str, after: datetime) -> datetime:
    """Returns the first time behind a moment at which a schedule fires, in UTC. Raises Invalid for
    an expression that is none or has no such time, and for a zone that there is not."""
    zone = zone_of(time_zone)
    if len(cron) > MAX_CRON_CHARS or len(cron.split()) != NUM_FIELDS:
        raise Invalid("cron", f"{cron[:64]!r} does not have {NUM_FIELDS} fields", REMEDY)
    try:
        times = CronSim(cron, after.astimezone(zone))
        for _ in range(MAX_TIMES):
            time = next(times).astimezone(UTC)
            if time > after:
                return time
    except (CronSimError, ValueError) as error:
        raise Invalid("cron", f"{cron[:64]!r} is no cron expression: {error}", REMEDY) from error
    except (StopIteration, OverflowError):
        pass
    raise Invalid("cron", f"{cron[:64]!r} names no time that comes", REMEDY)


def zone_of(name: str) -> ZoneInfo:
    """Returns a zone of the IANA data base. Raises Invalid."""
    try:
        return ZoneInfo(name)
    # Also a folder of the data base, or a name that is no file's.
    except (LookupError, ValueError, OSError) as error:
        remedy = "Use a name of the IANA time zone data base: `Europe/Berlin`, `UTC`"
        raise Invalid("time_zone", f"{name[:64]!r} is none", remedy) from error
