"""Whether acts on many jobs did what was acknowledged, and counted it. Knows no server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from uuid import UUID

from tests.chaos.judge.tenants.rows import Row
from tests.chaos.load.tenants.ledger import JobGroup


def broken_acts(groups: Sequence[JobGroup], jobs: Mapping[UUID, Row]) -> Iterator[str]:
    """Yields what was acknowledged and did not happen, happened twice, or was counted otherwise."""
    replays = Counter(job["replay_of"] for job in jobs.values() if job["replay_of"] is not None)
    for group in groups:
        for problem in _problems(group, jobs, replays):
            yield f"group {group.name}: {problem}"


def _problems(
    group: JobGroup, jobs: Mapping[UUID, Row], replays: Mapping[UUID, int]
) -> Iterator[str]:
    held = [jobs[job_id] for job_id in group.held if job_id in jobs]
    everything = [*held, *(jobs[job_id] for job_id in group.live if job_id in jobs)]
    if "prioritize" in group.changed:
        others = [job for job in held if job["priority"] != group.priority]
        if others:
            yield f"{len(others)} held jobs have another priority than {group.priority}"
        prioritized = [job for job in everything if job["priority"] == group.priority]
        yield from _counted(group, "prioritize", len(prioritized))
    if "cancel" in group.changed:
        going_on = [job for job in held if job["state"] != "cancelled"]
        if going_on:
            yield f"{len(going_on)} held jobs are not canceled, such as {going_on[0]['id']}"
        asked = [
            job
            for job in everything
            if job["state"] == "cancelled" or job["cancel_requested_at"] is not None
        ]
        yield from _counted(group, "cancel", len(asked))
    if "retry" in group.changed:
        nums = [replays.get(job_id, 0) for job_id in group.again]
        if any(num != 1 for num in nums):
            yield f"jobs that were to be tried again have {nums} replays"
        yield from _counted(group, "retry", sum(nums))


def _counted(group: JobGroup, act: str, num: int) -> Iterator[str]:
    """An answer that was lost on its way has a part of the count."""
    told = group.changed[act]
    if told > num or (told < num and not group.num_unanswered.get(act)):
        yield f"{act} told of {told} jobs, and changed {num}"
