"""Rules of doors, readers and Celery tasks, broken one at a time. Knows no stage."""

from __future__ import annotations

from typing import Final

from tests.chaos.mutants.mutant import Hurt, Mutant, Patch

REPEATS = "shared/shardline/store/idempotency.py"
COMPLETION = "shared/shardline_server/tokenize/completion.py"

MUTANTS: Final[tuple[Mutant, ...]] = (
    Mutant(
        name="same-request rule: what preparation added counts",
        patches=(
            Patch(
                file=REPEATS,
                within="REPEATED",
                old="OR CASE WHEN num_nonnulls(jobs.prompt, jobs.messages) = 0"
                " THEN jobs.prompt_ids END IS DISTINCT",
                new="OR jobs.prompt_ids IS DISTINCT",
            ),
        ),
        tests=(
            "tests/integration/store/test_repeats.py"
            "::test_a_request_repeated_at_any_stage_of_its_life_is_the_same_job",
        ),
        hurt=Hurt(faults="kill gateway", counts=("conflicts",), load="users"),
    ),
    Mutant(
        name="text rule: a door gives out what a head holds back",
        patches=(
            Patch(
                file=COMPLETION,
                within="CompletionText.say",
                old="parts.append(self.push(token_id)[0])",
                new="parts.append(self.push(token_id)[0] + self._detokenizer.flush())",
            ),
        ),
        tests=(
            "tests/unit/tokenize/test_text_rule.py"
            "::test_the_rest_of_a_stream_joined_after_any_token_is_the_rest_of_the_text",
        ),
        hurt=Hurt(faults="redis: flushall", counts=("text_mismatches",), minutes=2.0, load="users"),
    ),
    Mutant(
        name="once rule: what a dead relay sent is sent again",
        patches=(
            Patch(
                file="services/relay/celery/once_transport.py",
                within="PUT_ONCE",
                old="if redis.call('HSETNX', KEYS[1], ARGV[1], 1) == 1 then",
                new="if redis.call('HSETNX', KEYS[1], ARGV[1], 1) then",
            ),
        ),
        tests=(
            "tests/integration/relay/test_canvas.py"
            "::test_a_relay_killed_between_calling_back_and_noting_it_calls_nothing_twice",
        ),
    ),
    Mutant(
        name="due rule: a job may end unseen while its task is stored",
        patches=(
            Patch(
                file="shared/shardline_server/store/celery_tasks.py",
                within="STORE",
                old="WHERE id = :job_id FOR NO KEY UPDATE",
                new="WHERE id = :job_id",
            ),
        ),
        tests=(
            "tests/integration/store/test_celery_tasks.py"
            "::test_a_job_that_ends_while_its_task_is_stored_leaves_the_task_due",
        ),
    ),
)
