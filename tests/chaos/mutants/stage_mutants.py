"""Rules of heads, hops and arithmetic, broken one at a time. Knows no row."""

from __future__ import annotations

from typing import Final

from tests.chaos.mutants.mutant import Hurt, Layer, Mutant, Patch

LEASE_MANAGER = "services/stage/jobs/lease_manager.py"
HOP = "services/stage/hop/zeromq.py"
SCHEDULER = "shared/shardline_scheduler/scheduler.py"
STEP_CUTTER = "shared/shardline_scheduler/step_cutter.py"
STEP_PLAN = "shared/shardline_scheduler/step_plan.py"

KV_RULE: Final = "tests/unit/scheduler/test_kv_rule.py"
OFFLOAD = "shared/shardline_scheduler/offload.py"
OFFLOADED: Final = "tests/unit/scheduler/test_offload.py"
PREFIX_CACHE = "shared/shardline_scheduler/prefix_cache.py"
FOUND: Final = "tests/unit/scheduler/test_prefix_cache.py"
SAMPLER = "services/stage/sampling/sampler.py"
SAMPLED: Final = "tests/unit/stage/engine/test_sampler.py"
EXECUTED: Final = "tests/unit/stage/engine/test_executor.py"
STRUCTURED: Final = "tests/unit/stage/engine/test_structured_output.py"
GUESSED: Final = "tests/unit/scheduler/test_prompt_lookup.py"
PREFILL: Final = "tests/unit/scheduler/test_prefill.py"
NARROW: Final = "tests/unit/scheduler/test_narrow_steps.py"

MUTANTS: Final[tuple[Mutant, ...]] = (
    Mutant(
        name="no self-fencing",
        patches=(
            Patch(
                file="services/stage/engine/head_engine.py",
                within="HeadEngine._turn",
                old="self.is_fenced = lease_clock_s() >= self._may_run_until_s",
                new="self.is_fenced = False",
            ),
        ),
        is_simulated=True,
        hurt=Hurt(
            faults="lease: a head is cut off from Postgres 4 leases",
            counts=("stale_deltas",),
            stages=1,
            replicas=2,
        ),
    ),
    Mutant(
        name="deltas ahead of the checkpoint with exact=false",
        patches=(
            Patch(
                file=LEASE_MANAGER,
                within="LeaseManager.report",
                old="if job.exact:",
                new="if job.exact or True:",
            ),
        ),
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
        patches=(
            Patch(
                file=HOP,
                within="ZeroMqReceiver._accepts",
                old="if frame.epoch < channel.epoch:",
                new="if frame.epoch < 0:",
            ),
        ),
        tests=("tests/conformance/test_hop.py::test_frames_of_an_older_epoch_are_dropped",),
        hurt=Hurt(
            faults="frames: of an older epoch come again",
            counts=("token_mismatches",),
            insecure=True,
        ),
    ),
    Mutant(
        name="step gap ignored",
        patches=(
            Patch(
                file=HOP,
                within="ZeroMqReceiver._accepts",
                old="if frame.step != self._next_step:",
                new="if frame.step < 0:",
            ),
        ),
        tests=("tests/conformance/test_hop.py::test_steps_that_are_not_contiguous_lose_the_link",),
        hurt=Hurt(faults="frames: one is lost", counts=("token_mismatches",), insecure=True),
        hidden_by=Layer(
            name="the head's own count of steps",
            patches=(
                Patch(
                    file=STEP_PLAN,
                    within="StepPlan.check",
                    old="if result.step != self.step:",
                    new="if result.step < 0:",
                ),
            ),
        ),
    ),
    # The next two change the last bit of few elements: no token of a real stack has followed from
    # that yet.
    Mutant(
        name="one-row matmul allowed",
        patches=(
            Patch(
                file="services/stage/products/row_buckets.py",
                within="ROW_BUCKETS",
                old="*(2, 4, 8,",
                new="*(1, 2, 4, 8,",
            ),
        ),
        tests=("tests/unit/stage/products/test_row_buckets.py::test_every_padded_share_is_whole",),
    ),
    Mutant(
        name="no ceiling for the rows of a product",
        patches=(
            Patch(
                file="services/stage/products/row_buckets.py",
                within="panel_sizes",
                old="if not buckets:\n        return (num_rows,)",
                new="if not buckets or num_rows > buckets[-1]:\n        return (num_rows,)",
            ),
        ),
        tests=(
            "tests/unit/stage/products/test_row_buckets.py"
            "::test_rows_are_cut_into_few_allowed_panels",
        ),
    ),
    Mutant(
        name="a job that breaks a later stage is kept for ever",
        patches=(
            Patch(
                file=SCHEDULER,
                within="Scheduler.rebuild",
                old="if sequence is old.in_quarantine and not sequence.has_progress:",
                new="if sequence is old.in_quarantine and sequence.request is None:",
            ),
        ),
        is_simulated=True,
    ),
    Mutant(
        name="prefill rule: the first in line takes the whole step",
        patches=(
            Patch(
                file=STEP_CUTTER,
                within="StepCutter._add_chunks",
                old="max(MIN_CHUNK, left // 2)",
                new="left",
            ),
        ),
        tests=(f"{PREFILL}::test_a_prefill_takes_half_of_what_is_left_while_others_wait_else_all",),
        hurt=Hurt(faults="prefill", counts=("broken",)),
    ),
    Mutant(
        name="narrow steps: prompts without end stop the batch",
        patches=(
            Patch(
                file=STEP_CUTTER,
                within="StepCutter.cut",
                old="not self._was_narrow and ",
                new="",
            ),
        ),
        tests=(f"{NARROW}::test_others_have_every_second_step",),
    ),
    Mutant(
        name="prefill rule: those that have begun go first",
        patches=(
            Patch(
                file=STEP_CUTTER,
                within="StepCutter._in_line",
                old="newcomer.order < sequence.order:\n                yield",
                new="newcomer.order < (-1, 0):\n                yield",
            ),
            Patch(
                file=STEP_CUTTER,
                within="StepCutter._add_chunks",
                old="max(MIN_CHUNK, left // 2)",
                new="left",
            ),
        ),
        tests=(
            f"{PREFILL}::test_an_urgent_prompt_has_its_first_token_in_three_steps_among_long_ones",
        ),
    ),
    Mutant(
        name="KV rule: a smaller pool fails running jobs",
        patches=(
            Patch(
                file=SCHEDULER,
                within="Scheduler.rebuild",
                old="self._outgrow(each)",
                new='self._fail(each, "no KV")',
            ),
        ),
        tests=(
            f"{KV_RULE}::test_a_new_epoch_with_less_kv_gives_back_the_long_job_and_runs_the_others",
        ),
        hurt=Hurt(faults="memory: one of two pipelines", counts=("lost",), load="users"),
    ),
    Mutant(
        name="KV rule: what a job may need at most must fit",
        patches=(
            Patch(
                file=SCHEDULER,
                within="Scheduler._is_too_long",
                old="return blocks_for(len(sequence.ids)) > self.config.num_blocks",
                new="return sequence.most_blocks > self.config.num_blocks",
            ),
        ),
        tests=(
            f"{KV_RULE}::test_a_completion_within_the_pool_is_whole_though_its_limit_is_beyond",
        ),
    ),
    Mutant(
        name="prefix cache: the tokens before a block do not count",
        patches=(
            Patch(
                file=PREFIX_CACHE,
                within="_digest",
                old="before = digests[-1] if digests else",
                new="before =",
            ),
        ),
        tests=(f"{FOUND}::test_equal_tokens_after_another_beginning_are_not_found",),
    ),
    Mutant(
        name="prefix cache: blocks are found before they are filled",
        patches=(
            Patch(
                file=PREFIX_CACHE,
                within="PrefixCache.keep",
                old="<= sequence.num_computed:",
                new="<= len(sequence.ids):",
            ),
        ),
        tests=(f"{FOUND}::test_a_block_is_found_only_once_a_step_has_filled_it",),
    ),
    Mutant(
        name="prefix cache: tenants find each other's blocks",
        patches=(
            Patch(
                file=PREFIX_CACHE,
                within="_digest",
                old="(request.tenant, request.adapter,",
                new="(request.adapter,",
            ),
        ),
        tests=(f"{FOUND}::test_another_tenant_finds_nothing",),
    ),
    Mutant(
        name="offload: a cancelled job keeps its slots",
        patches=(
            Patch(
                file=SCHEDULER,
                within="Scheduler._end",
                old="self._batch.offload.drop(sequence)",
                new="pass",
            ),
        ),
        tests=(f"{OFFLOADED}::test_a_job_that_is_cancelled_while_it_waits_leaves_its_slots",),
    ),
    Mutant(
        name="offload: blocks are copied in another order",
        patches=(
            Patch(
                file=OFFLOAD,
                within="Offload.take_moves",
                old="tuple(self._moves)",
                new="tuple(reversed(self._moves))",
            ),
        ),
        tests=(f"{OFFLOADED}::test_a_block_is_copied_out_before_another_is_copied_into_its_place",),
    ),
    Mutant(
        name="structured output: what was said before a resume does not count",
        patches=(
            Patch(
                file="services/stage/sampling/sampled_sequence.py",
                within="SampledSequence.extend",
                old="self._grammar.take(ids)",
                new="self._grammar.take(ids[:1])",
            ),
        ),
        tests=(f"{STRUCTURED}::test_a_tail_that_starts_again_goes_on_with_the_same_tokens",),
        hurt=Hurt(
            faults="kill head",
            counts=("token_mismatches", "invalid_calls", "lost"),
            minutes=1.0,
            load="users",
        ),
    ),
    Mutant(
        name="prompt lookup: a guess counts that was not sampled",
        patches=(
            Patch(
                file=SAMPLER,
                within="Sampler._run",
                old="if token != draft or sequence.ends_with(token):",
                new="if draft is None:",
            ),
        ),
        tests=(
            f"{SAMPLED}::test_drafts_are_sampled_as_if_one_by_one_up_to_the_first_that_is_wrong",
        ),
    ),
    Mutant(
        name="prompt lookup: history lacks the guesses that came true",
        patches=(
            Patch(file=SAMPLER, within="Sampler._run", old="sequence.extend((token,))", new="pass"),
        ),
        tests=(
            f"{SAMPLED}::test_drafts_are_sampled_as_if_one_by_one_up_to_the_first_that_is_wrong",
        ),
    ),
    Mutant(
        name="prompt lookup: guesses count as computed before they came true",
        patches=(
            Patch(
                file="shared/shardline_scheduler/step_builder.py",
                within="StepBuilder.add",
                old="sequence.num_computed = end",
                new="sequence.num_computed = end + len(drafts)",
            ),
        ),
        tests=(
            f"{GUESSED}::test_the_next_row_begins_behind_the_guesses_that_came_true",
            f"{GUESSED}::test_a_block_is_found_by_others_only_once_its_guesses_came_true",
        ),
    ),
    Mutant(
        name="prompt lookup: a stage keeps guesses that did not come true",
        patches=(
            Patch(
                file="shared/shardline_scheduler/open_sequences.py",
                within="OpenSequence.settle",
                old="del self.ids[start:]",
                new="pass",
            ),
        ),
        tests=(f"{EXECUTED}::test_drafts_that_come_true_or_not_leave_the_tokens_of_single_steps",),
    ),
)
