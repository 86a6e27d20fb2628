"""Rules of heads, hops and arithmetic, broken one at a time. Knows no row."""

from __future__ import annotations

from typing import Final

from tests.faults.mutant import Hurt, Layer, Mutant, Patch

LEDGER = "services/stage/jobs/lease_manager.py"
HOP = "services/stage/hop/zeromq.py"
SCHEDULER = "services/stage/scheduling/scheduler.py"

KV_RULE: Final = "tests/unit/test_kv_rule.py"
PREFILL: Final = "tests/unit/test_prefill.py"

MUTANTS: Final[tuple[Mutant, ...]] = (
    Mutant(
        name="no self-fencing",
        patches=(
            Patch(
                file="services/stage/engine/engine.py",
                old="self.fenced = lease_clock_s() >= self.may_run_until_s",
                new="self.fenced = False",
            ),
        ),
        is_simulated=True,
        hurt=Hurt(
            faults="lease: a head is cut off from Postgres 4 leases", counts=("stale_deltas",), stages=1, replicas=2
        ),
    ),
    Mutant(
        name="deltas ahead of the checkpoint with exact=false",
        patches=(Patch(file=LEDGER, old="        if job.exact:\n", new="        if job.exact or True:\n"),),
        is_simulated=True,
        hurt=Hurt(
            faults="kill head at after-emit",
            counts=("retracted",),
            minutes=2.0,
            dtype="bfloat16",
            exact=False,
            wide=True,
        ),
    ),
    Mutant(
        name="epoch ignored on frames",
        patches=(Patch(file=HOP, old="if frame.epoch < channel.epoch:", new="if frame.epoch < 0:"),),
        tests=("tests/conformance/test_hop.py::test_frames_of_an_older_epoch_are_dropped",),
        hurt=Hurt(faults="frames: of an older epoch come again", counts=("token_mismatches",), insecure=True),
    ),
    Mutant(
        name="step gap ignored",
        patches=(Patch(file=HOP, old="if frame.step != self._next_step:", new="if frame.step < 0:"),),
        tests=("tests/conformance/test_hop.py::test_steps_that_are_not_contiguous_lose_the_link",),
        hurt=Hurt(faults="frames: one is lost", counts=("token_mismatches",), insecure=True),
        hidden_by=Layer(
            name="the head's own count of steps",
            patches=(
                Patch(
                    file=SCHEDULER,
                    old="if expected is None or result.step != expected.step:",
                    new="if expected is None:",
                ),
            ),
        ),
    ),
    # The next two change the last bit of few elements: no token of a real stack has followed from that yet.
    Mutant(
        name="one-row matmul allowed",
        patches=(Patch(file="services/stage/model/row_buckets.py", old="    *(2, 4, 8,", new="    *(1, 2, 4, 8,"),),
        tests=("tests/unit/test_padding.py::test_given_rows_when_padded_then_every_share_is_whole",),
    ),
    Mutant(
        name="no ceiling for the rows of a product",
        patches=(
            Patch(
                file="services/stage/model/row_buckets.py",
                old="    if not buckets:\n        return (num_rows,)",
                new="    if not buckets or num_rows > buckets[-1]:\n        return (num_rows,)",
            ),
        ),
        tests=("tests/unit/test_padding.py::test_given_rows_when_cut_then_panels_are_allowed_and_few",),
    ),
    Mutant(
        name="a job that breaks a later stage is kept for ever",
        patches=(
            Patch(
                file=SCHEDULER,
                old="if sequence is alone and not sequence.has_progress:",
                new="if sequence is alone and sequence.request is None:",
            ),
        ),
        is_simulated=True,
    ),
    Mutant(
        name="prefill rule: the first in line takes the whole step",
        patches=(Patch(file=SCHEDULER, old="max(MIN_CHUNK, left // 2)", new="left"),),
        tests=(f"{PREFILL}::test_a_prefill_takes_half_of_what_is_left_while_others_wait_and_all_of_it_when_none_does",),
        hurt=Hurt(faults="prefill", counts=("broken",)),
    ),
    Mutant(
        name="prefill rule: those that have begun go first",
        patches=(
            Patch(
                file=SCHEDULER,
                old="newcomer.rank < sequence.rank:\n                yield",
                new="newcomer.rank < (-1, 0):\n                yield",
            ),
            Patch(file=SCHEDULER, old="max(MIN_CHUNK, left // 2)", new="left"),
        ),
        tests=(
            f"{PREFILL}"
            "::test_given_many_long_prompts_when_an_urgent_one_arrives_then_its_first_token_comes_within_three_steps",
        ),
    ),
    Mutant(
        name="KV rule: a smaller pool fails running jobs",
        patches=(Patch(file=SCHEDULER, old="*(self._outgrow(each) for", new='*(self._fail(each, "no KV") for'),),
        tests=(
            f"{KV_RULE}"
            "::test_given_running_jobs_when_a_new_epoch_has_less_kv_then_the_long_one_goes_back_and_the_others_go_on",
        ),
        hurt=Hurt(faults="memory: one of two pipelines", counts=("lost",), load="users"),
    ),
    Mutant(
        name="KV rule: what a job may need at most must fit",
        patches=(
            Patch(
                file=SCHEDULER,
                old="return blocks_for(len(sequence.ids)) > self.config.num_blocks",
                new="return sequence.most_blocks > self.config.num_blocks",
            ),
        ),
        tests=(f"{KV_RULE}::test_given_a_limit_beyond_the_pool_when_the_completion_ends_before_then_it_is_whole",),
    ),
)
