"""Rules of doors, readers and Celery tasks, broken one at a time. Knows no stage."""

from __future__ import annotations

from typing import Final

from tests.chaos.mutants.mutant import Hurt, Mutant, Patch

REPEATS = "shared/shardline/store/idempotency.py"
BATCH_LINES = "shared/shardline/store/batch_lines.py"
COMPLETION = "shared/shardline_server/tokenize/completion.py"
CHOICES = "shared/shardline/contract/choices.py"
NOT_THE_LAST = "for place in range(1, n - 1)"
CHOSEN = (
    "tests/integration/gateway/test_choices.py"
    "::test_each_choice_is_a_row_and_the_first_one_names_them_all"
)
RENUMBERED = (
    "tests/integration/gateway/test_responses.py"
    "::test_a_stream_is_the_same_with_the_same_numbers_however_it_is_read"
)

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
            "::test_a_job_that_ends_after_its_task_is_stored_leaves_the_task_due",
        ),
    ),
    Mutant(
        name="choices: the last one is lost",
        patches=(
            Patch(
                file=CHOICES, within="choices_of", old="for place in range(1, n)", new=NOT_THE_LAST
            ),
        ),
        tests=(CHOSEN,),
        hurt=Hurt(faults="kill gateway", counts=("lost",), load="users"),
    ),
    Mutant(
        name="choices: one is drawn twice",
        patches=(
            Patch(file=CHOICES, within="choice_seed", old="if place == 0:", new="if place >= 0:"),
        ),
        tests=(CHOSEN,),
        hurt=Hurt(faults="kill gateway", counts=("lost",), load="users"),
    ),
    Mutant(
        name="responses: a reader who joins again gets the last event twice",
        patches=(
            Patch(
                file="services/gateway/responses/response_events.py",
                within="_is_wanted",
                old="one.sequence_number > after",
                new="one.sequence_number >= after",
            ),
        ),
        tests=(RENUMBERED,),
        hurt=Hurt(faults="kill gateway", counts=("retracted",), load="users"),
    ),
    Mutant(
        name="responses: the first event of the output has the number of the one before",
        patches=(
            Patch(
                file="services/gateway/responses/response_events.py",
                within="_numbered",
                old="first_number=beginning.sequence_number + 1",
                new="first_number=beginning.sequence_number",
            ),
        ),
        tests=(RENUMBERED,),
        hurt=Hurt(faults="kill gateway", counts=("retracted",), load="users"),
    ),
    Mutant(
        name="decisions: numbers are not those of the options among themselves",
        patches=(
            Patch(
                file="shared/shardline/contract/decision.py",
                within="decide",
                old="tuple(one / total for one in weights)",
                new="tuple(weights)",
            ),
        ),
        tests=(
            "tests/integration/gateway/test_decisions.py::test_rows_have_the_numbers_in_columns",
        ),
    ),
    Mutant(
        name="batches: a line is counted twice",
        patches=(
            Patch(
                file=BATCH_LINES,
                within="COUNT",
                old="WHERE l.batch_id = :id AND l.line >= :first_open",
                new="WHERE l.batch_id = :id AND :first_open > 0",
            ),
        ),
        tests=(
            "tests/integration/gateway/test_batches.py"
            "::test_output_is_there_as_lines_end_and_a_cancel_keeps_it",
        ),
        hurt=Hurt(faults="kill gateway", counts=("mistold",), load="users"),
    ),
    Mutant(
        name="batches: a line that is open at a count is lost",
        patches=(
            Patch(
                file=BATCH_LINES,
                within="count_lines",
                old='first_open = row["open_line"]',
                new='first_open = row["open_line"] + 1',
            ),
        ),
        tests=(
            "tests/integration/gateway/test_batches.py"
            "::test_each_line_is_answered_as_its_route_answers",
        ),
        hurt=Hurt(faults="kill gateway", counts=("lost", "mistold"), load="users"),
    ),
)
