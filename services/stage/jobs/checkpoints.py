"""What one heartbeat saves: every lease, and all that is new while Postgres can write it within the
beat. No statement.

The log-probabilities of an attempt are one array, which Postgres rewrites whenever some are added:
64 jobs of 4,000 tokens with 20 alternatives each are 200 MB. So a beat saves those of a few jobs,
in turn, and renews the leases of all. A job that is passed over loses nothing: its next turn saves
more, and a resume makes the rest again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.stage.jobs.live_job import LiveJob
from shardline_server.store.leases import Beat

MAX_REWRITTEN = 8_192
"""Tokens with log-probabilities that one beat rewrites: 7 MB with 20 alternatives each. A longer
job has one alone."""


def beats_of(jobs: Sequence[LiveJob]) -> list[Beat]:
    """One for each job, in their order."""
    chosen = {job.key for job in _chosen(jobs)}
    return [job.beat() if job.key in chosen else job.bare_beat() for job in jobs]


def _chosen(jobs: Iterable[LiveJob]) -> Iterable[LiveJob]:
    """First those of which nothing is saved, because their first tokens show that they harm no
    engine; then those that were passed over most often."""
    num_rewritten = 0
    for job in sorted(jobs, key=lambda job: (not job.is_unsaved, -job.num_passed_over)):
        cost = len(job.logprobs) if len(job.logprobs) > job.num_saved else 0
        if cost and num_rewritten and num_rewritten + cost > MAX_REWRITTEN:
            job.num_passed_over += 1
        else:
            num_rewritten += cost
            job.num_passed_over = 0
            yield job
