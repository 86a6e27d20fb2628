"""Rules of doors and readers, broken one at a time. Knows no stage and no relay."""

from __future__ import annotations

from typing import Final

from tests.faults.mutant import Hurt, Mutant, Patch

REPEATS = "shared/shardline/store/repeats.py"
COMPLETION = "shared/shardline/tokenize/completion.py"

MUTANTS: Final[tuple[Mutant, ...]] = (
    Mutant(
        name="same-request rule: what preparation added counts",
        patches=(
            Patch(
                file=REPEATS,
                old="OR CASE WHEN num_nonnulls(jobs.prompt, jobs.messages) = 0 THEN jobs.prompt_ids END IS DISTINCT",
                new="OR jobs.prompt_ids IS DISTINCT",
            ),
        ),
        tests=(
            "tests/integration/test_store_repeats.py"
            "::test_given_a_request_when_it_comes_again_in_any_stage_of_its_life_then_it_is_the_same_job",
        ),
        hurt=Hurt(faults="kill gateway", counts=("conflicts",), load="users"),
    ),
    Mutant(
        name="text rule: a door gives out what a head holds back",
        patches=(
            Patch(
                file=COMPLETION,
                old="            parts.append(self.push(token_id)[0])\n",
                new="            parts.append(self.push(token_id)[0] + self._detokenizer.flush())\n",
            ),
        ),
        tests=(
            "tests/unit/test_text_rule.py"
            "::test_given_any_output_when_its_stream_is_joined_after_any_token_then_the_rest_is_the_results_text",
        ),
        hurt=Hurt(faults="redis: flushall", counts=("text_mismatches",), minutes=2.0, load="users"),
    ),
)
