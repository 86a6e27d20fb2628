"""Which of the offered jobs a head may claim, so that a poison job costs nobody else a crash. Knows no Postgres."""

from __future__ import annotations

from collections.abc import Iterable

from services.stage.worker.live import LiveJob


def claimable(ids: list[str], suspects: list[str], live: Iterable[LiveJob]) -> list[str]:
    """A suspect is claimed alone, once all that live here have saved a token; until it has too, nobody else is. So
    whatever it breaks is counted a crash for nobody else. `suspects` are those of `ids`, in their order."""
    unproven = [job for job in live if job.is_unproven]
    if any(job.claimed.crashes > 0 for job in unproven):
        return []
    if suspects:
        return [] if unproven else suspects[:1]
    return ids
