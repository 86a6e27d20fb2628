"""Rules of quotas, pauses, schedules, families, webhooks and acts on many, broken one at a time.
Knows no stage."""

from __future__ import annotations

from typing import Final

from tests.chaos.mutants.mutant import Hurt, Mutant, Patch

ACTS = "shared/shardline/store/bulk_acts.py"
REPLAYED = "AND NOT EXISTS (SELECT FROM jobs AS replays WHERE replays.replay_of = jobs.id)"


def _hurt(count: str, *, minutes: float = 0.7) -> Hurt:
    return Hurt(faults="kill gateway", counts=(count,), minutes=minutes, load="users")


MUTANTS: Final[tuple[Mutant, ...]] = (
    Mutant(
        name="quotas: an end gives nothing back of what was reserved",
        patches=(
            Patch(
                file="migrations/functions/0026_quotas.sql",
                old="ELSE 0 END, -held.bytes, -held.tokens,",
                new="ELSE 0 END, -held.bytes, 0,",
            ),
        ),
        tests=("tests/integration/store/test_quotas.py::test_whatever_ends_a_job_settles_it_once",),
        hurt=_hurt("quotas"),
    ),
    Mutant(
        name="pauses: a claim takes what is paused",
        patches=(
            Patch(
                file="shared/shardline_server/store/claims.py",
                within="CLAIMABLE",
                old="AND jobs.paused_by IS NULL AND {PAUSED_BY} IS NULL",
                new="",
            ),
        ),
        tests=(
            "tests/integration/store/test_pauses.py"
            "::test_what_is_sent_is_not_claimed_and_what_runs_goes_on",
        ),
        hurt=_hurt("pauses", minutes=1.5),
    ),
    Mutant(
        name="schedules: a time is two jobs",
        patches=(
            Patch(
                file="shared/shardline_server/store/due_schedules.py",
                within="_fire",
                old="insert_all(connection, [replace(encoded, key_name=row.key_name)])",
                new="insert_all(connection, [encoded, encode_request(wanted)])",
            ),
        ),
        tests=("tests/integration/store/test_schedules.py::test_of_several_relays_one_fires",),
        hurt=_hurt("schedules", minutes=1.5),
    ),
    Mutant(
        name="families: a job waits for one of its parents alone",
        patches=(
            Patch(
                file="shared/shardline_server/store/parents.py",
                within="RELEASE",
                old="parents_of_jobs.state IN ('due', 'open'))",
                new="parents_of_jobs.state = 'due')",
            ),
        ),
        tests=(
            "tests/integration/store/test_parents.py"
            "::test_a_job_is_released_by_the_last_of_ten_parents",
        ),
        hurt=_hurt("families"),
    ),
    Mutant(
        name="webhooks: one that was refused is not sent again",
        patches=(
            Patch(
                file="services/relay/notices/webhook_sender.py",
                within="WebhookSender._outcome",
                old='"delivered" if answer.is_success else',
                new='"delivered" if answer.status_code else',
            ),
        ),
        tests=(
            "tests/integration/relay/test_webhooks.py"
            "::test_endpoints_that_fail_hang_or_move_harm_nobody_else_and_replays_arrive",
        ),
        hurt=_hurt("webhooks", minutes=1.0),
    ),
    Mutant(
        name="acts on many: a job is tried again by each repeat",
        patches=(
            Patch(file=ACTS, within="RETRY", old=REPLAYED, new=""),
            Patch(
                file=ACTS,
                within="_is_open",
                old="[has_prompt, ~exists().where(replays.c.replay_of == jobs.c.id)]",
                new="[has_prompt]",
            ),
        ),
        tests=(
            "tests/integration/store/test_bulk_acts.py"
            "::test_jobs_are_retried_once_by_whoever_asks_at_the_same_time",
        ),
        hurt=_hurt("bulk_acts"),
    ),
)
