"""Rules of rows, leases, messages and relays, broken one at a time. Knows no stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tests.chaos.mutants.mutant import RELAY_STATEMENTS, STATEMENTS, Hurt, Layer, Mutant, Patch

CLAIMS = "shared/shardline_server/store/claims.py"
LEASES = "shared/shardline_server/store/leases.py"
ENDS = "shared/shardline_server/store/ends.py"
OUTBOX = "shared/shardline_server/store/outbox.py"
CRASHES = "shared/shardline_server/store/crashes.py"

ROWS_AGREE: Final = "tests/conformance/test_rows.py"
CLAIM_TESTS: Final = "tests/integration/store/test_claims.py"
EXACT_TESTS: Final = "tests/integration/store/test_exact_claims.py"
SWEEP_TESTS: Final = "tests/integration/store/test_sweeps.py"
RULES: Final = "tests/integration/store/test_rules.py"

HEADS_DIE = Hurt(faults="kill head", counts=("lost",))
LEASE_MANAGER_HANGS = Hurt(
    faults="lease: a lease manager hangs 1.4 leases",
    counts=("stale_commits",),
    stages=1,
    replicas=2,
)

END_LOCK = """
    SELECT jobs.id
    FROM jobs JOIN ends ON ends.job_id = jobs.id AND ends.fence = jobs.fence
    WHERE jobs.state = :left"""
END_WRITE = """
    WHERE jobs.id = locked.id AND ends.job_id = jobs.id AND ends.fence = jobs.fence
        AND jobs.state = :left"""
REQUEUE_LOCK = """
    SELECT jobs.id
    FROM jobs JOIN keys ON keys.job_id = jobs.id AND keys.fence = jobs.fence
    WHERE jobs.state = 'running'"""
REQUEUE_WRITE = """
    WHERE jobs.id = locked.id AND keys.job_id = jobs.id AND keys.fence = jobs.fence
        AND jobs.state = 'running'"""
BEAT_LOCK = """
    SELECT jobs.id
    FROM jobs JOIN beats ON beats.job_id = jobs.id AND beats.fence = jobs.fence
    WHERE jobs.state = 'running'"""
BEAT_WRITE = """beats.job_id = jobs.id AND beats.fence = jobs.fence AND jobs.state = 'running'
        AND attempts.job_id"""
BEAT_REPLY = "FROM renewed JOIN beats ON beats.job_id = renewed.id AND beats.fence = renewed.fence"

HELD_END = "if job is not None and job.holds(one.fence, left):"
HELD_REQUEUE = """        if job is None or not job.holds(key.fence, JobState.RUNNING):
            continue
        tables.audit(job, key.fence, outcome)"""
HELD_BEAT = "if job is None or not job.holds(beat.fence, JobState.RUNNING):"

MUTANTS: Final[tuple[Mutant, ...]] = (
    Mutant(
        name="no fence in the write of an end",
        patches=(
            Patch(
                file=ENDS,
                within="END",
                old=END_LOCK,
                new=END_LOCK.replace(" AND ends.fence = jobs.fence", ""),
            ),
            Patch(
                file=ENDS,
                within="END",
                old=END_WRITE,
                new=END_WRITE.replace(" AND ends.fence = jobs.fence", ""),
            ),
            Patch(
                file=STATEMENTS,
                within="end",
                old=HELD_END,
                new=HELD_END.replace("one.fence", "job.fence"),
            ),
        ),
        tests=(f"{CLAIM_TESTS}::test_a_write_under_a_stale_fence_changes_nothing", ROWS_AGREE),
        hurt=LEASE_MANAGER_HANGS,
    ),
    Mutant(
        name="no fence in the write of a heartbeat",
        patches=(
            Patch(
                file=LEASES,
                within="HEARTBEAT",
                old=BEAT_LOCK,
                new=BEAT_LOCK.replace(" AND beats.fence = jobs.fence", ""),
            ),
            Patch(
                file=LEASES,
                within="HEARTBEAT",
                old=BEAT_WRITE,
                new=BEAT_WRITE.replace(" AND beats.fence = jobs.fence", ""),
            ),
            Patch(
                file=LEASES,
                within="HEARTBEAT",
                old=BEAT_REPLY,
                new=BEAT_REPLY.replace(" AND beats.fence = renewed.fence", ""),
            ),
            Patch(
                file=STATEMENTS,
                within="heartbeat",
                old=HELD_BEAT,
                new=HELD_BEAT.replace("beat.fence", "job.fence"),
            ),
        ),
        tests=(f"{CLAIM_TESTS}::test_a_write_under_a_stale_fence_changes_nothing", ROWS_AGREE),
        hurt=LEASE_MANAGER_HANGS,
    ),
    Mutant(
        name="rescue and release without fence",
        patches=(
            Patch(
                file=ENDS,
                within="REQUEUE",
                old=REQUEUE_LOCK,
                new=REQUEUE_LOCK.replace(" AND keys.fence = jobs.fence", ""),
            ),
            Patch(
                file=ENDS,
                within="REQUEUE",
                old=REQUEUE_WRITE,
                new=REQUEUE_WRITE.replace(" AND keys.fence = jobs.fence", ""),
            ),
            Patch(
                file=STATEMENTS,
                within="requeue",
                old=HELD_REQUEUE,
                new=HELD_REQUEUE.replace("(key.fence, J", "(job.fence, J"),
            ),
        ),
        tests=(f"{CLAIM_TESTS}::test_a_write_under_a_stale_fence_changes_nothing", ROWS_AGREE),
        hurt=replace(
            LEASE_MANAGER_HANGS, faults="lease: a lease manager hangs while its head drains"
        ),
    ),
    Mutant(
        name="a claim takes no new fence",
        patches=(
            Patch(
                file=CLAIMS,
                within="CLAIM",
                old="SET state = 'running', fence = fence + 1,",
                new="SET state = 'running', fence = 1,",
            ),
            Patch(
                file=STATEMENTS,
                within="claim",
                old="job.fence = job.fence + 1",
                new="job.fence = 1",
            ),
        ),
        tests=(f"{CLAIM_TESTS}::test_a_job_that_ran_before_is_claimed_with_the_next_fence",),
        hurt=HEADS_DIE,
    ),
    Mutant(
        name="no sweeper of leases",
        patches=(
            Patch(
                file="services/relay/sweeper.py",
                within="Sweeper._rescue",
                old="if now_s >= self._rescue_after_s:",
                new="if now_s < 0:",
            ),
        ),
        is_simulated=True,
        hurt=HEADS_DIE,
    ),
    Mutant(
        name="no re-send of lost messages",
        patches=(
            Patch(
                file=OUTBOX,
                within="STAMP",
                old=" UNION ALL SELECT id, NULL, NULL FROM unclaimed",
                new="",
            ),
            Patch(
                file=RELAY_STATEMENTS,
                within="stamp",
                old="due + lost, key=",
                new="due, key=",
            ),
        ),
        tests=(
            "tests/integration/store/test_outbox.py"
            "::test_an_unclaimed_job_is_sent_again_ever_more_rarely",
            ROWS_AGREE,
        ),
        is_simulated=True,
        hurt=Hurt(faults="kill relay at stamped", counts=("lost",)),
    ),
    Mutant(
        name="no primary key on results",
        patches=(
            Patch(
                file="migrations/versions/0001_the_first_tables.py",
                within="_create_results",
                old='sa.PrimaryKeyConstraint("job_id", name=op.f("results_pkey")),',
                new="",
            ),
        ),
        tests=(f"{RULES}::test_the_database_refuses_a_second_result",),
        hurt=Hurt(
            faults="postgres: COMMITs with unknown outcome", counts=("duplicated",), minutes=1.5
        ),
        hidden_by=Layer(
            name="the condition that only a running job ends",
            patches=(
                Patch(
                    file=ENDS,
                    within="END",
                    old=END_LOCK,
                    new=END_LOCK.replace("    WHERE jobs.state = :left", "    WHERE true"),
                ),
                Patch(
                    file=ENDS,
                    within="END",
                    old=END_WRITE,
                    new=END_WRITE.replace(" AND jobs.state = :left", ""),
                ),
            ),
        ),
    ),
    Mutant(
        name="leases by a worker's clock",
        patches=(
            Patch(
                file=LEASES, old="from uuid import UUID", new="from uuid import UUID\nimport time\n"
            ),
            Patch(
                file=LEASES,
                within="HEARTBEAT",
                old="UPDATE jobs SET lease_until = now() + make_interval(secs => :lease_s)\n"
                "    FROM locked, beats",
                new="UPDATE jobs\n"
                "    SET lease_until = to_timestamp(:client_s) + make_interval(secs => :lease_s)\n"
                "    FROM locked, beats",
            ),
            Patch(
                file=LEASES,
                within="heartbeat",
                old='{"beats": dump(rows), "lease_s": lease_s}',
                new='{"beats": dump(rows), "lease_s": lease_s, '
                '"client_s": time.clock_gettime(time.CLOCK_REALTIME)}',
            ),
            Patch(
                file=STATEMENTS,
                within="heartbeat",
                old="def heartbeat(tables: Tables, *, beats: str, lease_s: float)",
                new="def heartbeat(tables: Tables, *, beats: str, lease_s: float, client_s: float)",
            ),
            Patch(
                file=STATEMENTS,
                within="heartbeat",
                old="tables.grant(job, tables.now_s + lease_s)\n        if beat.ids:",
                new="tables.grant(job, client_s + lease_s)\n        if beat.ids:",
            ),
        ),
        tests=(f"{RULES}::test_a_lease_follows_the_time_of_postgres_and_not_the_workers_clock",),
        is_simulated=True,
        hurt=Hurt(
            faults="clock: a head two hours ahead dies,clock: a stage two hours behind",
            counts=("lost", "stale_commits"),
            minutes=0.5,
        ),
    ),
    Mutant(
        name="intake acknowledged before the insert",
        patches=(
            Patch(
                file="services/relay/intake.py",
                within="Intake._take",
                old="failpoint(Point.INTAKE_TAKEN)",
                new="self._redis.xack(\n"
                "            stream.key, INTAKE_GROUP, *(entry_id for entry_id, _ in entries)\n"
                "        )\n"
                "        failpoint(Point.INTAKE_TAKEN)",
            ),
        ),
        tests=(
            "tests/integration/relay/test_intake.py"
            "::test_entries_taken_without_postgres_stay_for_the_next_relay",
        ),
        hurt=Hurt(faults="kill relay at intake-taken", counts=("lost",), redis_lasts=True),
    ),
    Mutant(
        name="checkpoint appended instead of placed",
        patches=(
            Patch(
                file=LEASES,
                within="HEARTBEAT",
                old="tokens[1:beats.start] || beats.ids",
                new="tokens || beats.ids",
            ),
            Patch(
                file=STATEMENTS,
                within="heartbeat",
                old="saved[: beat.start] + beat.ids",
                new="saved + beat.ids",
            ),
        ),
        tests=(
            f"{CLAIM_TESTS}::test_a_repeated_heartbeat_stores_its_tokens_once",
            ROWS_AGREE,
        ),
        is_simulated=True,
        hurt=Hurt(
            faults="lease: a head dies unsure of its heartbeats",
            counts=("token_mismatches",),
            minutes=1.0,
        ),
    ),
    Mutant(
        name="crashes counted for neighbors",
        patches=(
            Patch(
                file=CRASHES,
                within="requeue_or_fail",
                old="if row.has_progress:",
                new="if row.has_progress is None:",
            ),
        ),
        tests=(
            f"{SWEEP_TESTS}::test_an_expired_lease_with_new_tokens_is_requeued_without_a_crash",
        ),
        is_simulated=True,
        hurt=replace(HEADS_DIE, counts=("blamed",)),
    ),
    Mutant(
        name="crashes counted for those that wait for KV",
        patches=(
            Patch(
                file=CRASHES,
                within="requeue_or_fail",
                old="if row.parked:",
                new="if row.parked is None:",
            ),
        ),
        tests=(
            f"{SWEEP_TESTS}::test_an_expired_lease_of_a_parked_job_is_requeued_without_a_crash",
        ),
    ),
    Mutant(
        name="a claim in an older epoch",
        patches=(
            Patch(
                file=CLAIMS,
                within="CLAIMABLE",
                old="AND jobs.model = pipelines.model AND pipelines.epoch = :epoch",
                new="AND jobs.model = pipelines.model AND pipelines.epoch >= :epoch",
            ),
        ),
        tests=(f"{CLAIM_TESTS}::test_a_head_of_an_older_epoch_claims_nothing", ROWS_AGREE),
    ),
    Mutant(
        name="KV rule: a claim of what is too long for the pipeline",
        patches=(
            Patch(
                file=CLAIMS,
                within="CLAIMABLE",
                old="AND {KNOWN_TOKENS} <= pipelines.kv_tokens",
                new="AND {KNOWN_TOKENS} > 0",
            ),
            Patch(
                file=STATEMENTS,
                within="_is_claimable",
                old="and not _is_too_long(tables, job, row)",
                new="",
            ),
        ),
        tests=(f"{CLAIM_TESTS}::test_jobs_longer_than_the_kv_are_left_for_a_larger_pipeline",),
    ),
    Mutant(
        name="exact rows: a claim of what asks for them without having them",
        patches=(
            Patch(file=CLAIMS, within="CLAIMABLE", old="AND NOT {LACKS_EXACT_ROWS}", new=""),
            Patch(
                file=STATEMENTS,
                within="_is_claimable",
                old="and not _lacks_exact_rows(job, row, exactness)",
                new="",
            ),
        ),
        tests=(
            f"{EXACT_TESTS}"
            "::test_a_job_that_asks_for_exact_rows_waits_for_them_and_then_for_the_same_ones",
        ),
    ),
)
