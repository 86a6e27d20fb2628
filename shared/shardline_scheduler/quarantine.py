"""Jobs that a lost epoch gave no token: one of them may have broken it. Remembered also after their
attempts."""

from __future__ import annotations

MAX_QUARANTINED = 1024


class Quarantine:
    """Job ids; the oldest is forgotten first."""

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._ids

    def add(self, job_id: str) -> None:
        """Makes it run alone among its kind from now on."""
        self._ids[job_id] = None
        if len(self._ids) > MAX_QUARANTINED:
            del self._ids[next(iter(self._ids))]

    def discard(self, job_id: str) -> None:
        """It has got a token."""
        self._ids.pop(job_id, None)
