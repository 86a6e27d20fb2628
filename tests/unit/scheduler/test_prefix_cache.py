"""What one sequence has computed, others of its tenant with the same first tokens do not compute
again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from shardline_scheduler.events import SequenceFailed, SequenceFinished
from shardline_scheduler.kv_blocks import BLOCK_TOKENS
from shardline_scheduler.sequence import Request
from tests.simulation.pipeline import Pipeline, checked, config, expected_output, request

HEAD = 2 * BLOCK_TOKENS


def job(name: str, **fields: Any) -> Request:
    """Two blocks of common tokens, then a few of its own."""
    return request(name, **{"num_prompt": HEAD + 5, "num_common": HEAD, "max_tokens": 4, **fields})


def finish(pipeline: Pipeline, *jobs: Request) -> list[SequenceFinished]:
    """Runs jobs to their end, all together. Their outputs are those of an undisturbed run."""
    for each in jobs:
        pipeline.add(each)
    pipeline.drain()
    ends = [pipeline.ends[each.key] for each in jobs]
    for each, end in zip(jobs, ends, strict=True):
        assert isinstance(end, SequenceFinished)
        assert list(end.output_ids) == expected_output(each, each.params.max_tokens or 1)
    return [end for end in ends if isinstance(end, SequenceFinished)]


def num_computed(pipeline: Pipeline, added: Request) -> int:
    """Rows of the prompt's first and only chunk."""
    pipeline.add(added)
    (row,) = checked(pipeline.schedule()).rows
    pipeline.deliver()
    return row.length


def test_a_second_job_computes_only_what_differs() -> None:
    pipeline = Pipeline(config())
    (first,) = finish(pipeline, job("a"))

    assert num_computed(pipeline, job("b")) == 5
    pipeline.drain()
    second = pipeline.ends[job("b").key]

    assert isinstance(second, SequenceFinished)
    assert (first.num_cached, second.num_cached) == (0, HEAD)
    assert list(second.output_ids) == expected_output(job("b"), 4)


def test_jobs_that_run_share_blocks_and_each_writes_only_its_own() -> None:
    pipeline = Pipeline(config(num_lanes=2))
    pipeline.add(job("a", max_tokens=300))
    pipeline.schedule()

    pipeline.add(job("b", max_tokens=300))
    pipeline.schedule()

    first, second = pipeline.stages.tables.values()
    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[2] != second.blocks[2]
    assert pipeline.scheduler.blocks_used == 4
    pipeline.drain()
    for name in "ab":
        assert pipeline.outputs[name, 1] == expected_output(job(name, max_tokens=300), 300)


def test_the_next_turn_of_a_chat_finds_prompt_and_answer() -> None:
    asked = request("a", num_prompt=40, max_tokens=200)
    pipeline = Pipeline(config())
    (turn,) = finish(pipeline, asked)
    known = (*asked.prompt_ids, *turn.output_ids)
    assert len(known) > BLOCK_TOKENS + 1, "the answer fills a block"

    (again,) = finish(pipeline, replace(job("b"), prompt_ids=(*known, 1, 2, 3)))

    # The last token's KV was never computed: it ended the completion.
    assert again.num_cached == (len(known) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_the_same_prompt_again_computes_its_last_block() -> None:
    same = {"num_prompt": HEAD, "num_common": HEAD}
    pipeline = Pipeline(config())
    finish(pipeline, job("a", **same))

    assert num_computed(pipeline, job("b", **same)) == BLOCK_TOKENS


def test_another_tenant_finds_nothing() -> None:
    pipeline = Pipeline(config())
    finish(pipeline, job("a"))

    assert num_computed(pipeline, job("b", tenant="another")) == HEAD + 5


@pytest.mark.parametrize(
    ("name", "fingerprint", "num"),
    [("legal", "1", 5), ("legal", "2", HEAD + 5), ("latest", "1", HEAD + 5)],
)
def test_blocks_of_an_adapter_are_found_under_its_name_and_fingerprint(
    name: str, fingerprint: str, num: int
) -> None:
    first, second = (
        replace(one, params=msgspec.structs.replace(one.params, adapter=adapter))
        for one, adapter in (
            (job("a", adapter="1"), "legal"),
            (job("b", adapter=fingerprint), name),
        )
    )
    pipeline = Pipeline(config())
    finish(pipeline, first)

    assert num_computed(pipeline, second) == num


def test_less_than_a_block_in_common_is_not_found() -> None:
    pipeline = Pipeline(config())
    finish(pipeline, job("a"))

    assert num_computed(pipeline, job("b", num_common=BLOCK_TOKENS - 1)) == HEAD + 5


def test_switched_off_it_finds_nothing_and_keeps_nothing() -> None:
    pipeline = Pipeline(config(prefix_cache=False))
    finish(pipeline, job("a"))

    assert num_computed(pipeline, job("b")) == HEAD + 5


def test_equal_tokens_after_another_beginning_are_not_found() -> None:
    first = job("a")
    tail = job("b").prompt_ids[BLOCK_TOKENS:]
    other = tuple(1 + token % 90 for token in range(BLOCK_TOKENS))
    assert other != first.prompt_ids[:BLOCK_TOKENS]
    pipeline = Pipeline(config())
    finish(pipeline, first)
    finish(pipeline, replace(job("other"), prompt_ids=(*other, 5)))

    assert num_computed(pipeline, replace(job("b"), prompt_ids=(*other, *tail))) == len(tail)


def test_a_block_is_found_only_once_a_step_has_filled_it() -> None:
    pipeline = Pipeline(config(token_budget=100))
    pipeline.add(job("a", priority=9))
    pipeline.schedule()
    pipeline.deliver()

    pipeline.add(job("b", priority=0))
    (opened,) = checked(pipeline.schedule()).opens

    assert opened.num_cached == BLOCK_TOKENS


def test_a_preempted_sequence_finds_what_it_had_computed() -> None:
    pipeline = Pipeline(config(num_blocks=6))
    jobs = [
        request(name, num_prompt=100, max_tokens=150, priority=number)
        for number, name in enumerate("ab")
    ]

    for each in jobs:
        pipeline.add(each)
    opened: list[int] = []
    while not pipeline.scheduler.idle:
        plan = pipeline.schedule()
        opened += [record.num_cached for record in plan.opens] if plan else []
        pipeline.deliver()

    assert len(opened) > 2, "one of them was preempted"
    assert max(opened[2:]) >= BLOCK_TOKENS
    for each in jobs:
        assert pipeline.outputs[each.key] == expected_output(each, 150)


def test_kept_blocks_are_given_to_whoever_needs_room_the_oldest_first() -> None:
    pipeline = Pipeline(config(num_blocks=6))
    old, recent, large = (
        job(name, num_common=0, max_tokens=1) for name in ("old", "recent", "large")
    )
    finish(pipeline, old)
    finish(pipeline, recent)

    finish(pipeline, large)

    assert num_computed(pipeline, replace(recent, key=("recent again", 1))) == 5
    pipeline.drain()
    assert num_computed(pipeline, replace(old, key=("old again", 1))) > 5


def test_kv_of_a_job_without_finite_logits_is_not_shared() -> None:
    pipeline = Pipeline(config())
    pipeline.add(job("a"))
    pipeline.schedule(bad=(0,))
    pipeline.deliver()
    assert isinstance(pipeline.ends[job("a").key], SequenceFailed)

    assert num_computed(pipeline, job("b")) == HEAD + 5


def test_a_new_epoch_knows_nothing() -> None:
    pipeline = Pipeline(config())
    finish(pipeline, job("a"))

    pipeline.rebuild(100)

    assert num_computed(pipeline, job("b")) == HEAD + 5


def test_shared_blocks_count_once_when_room_is_looked_for() -> None:
    pipeline = Pipeline(config(num_blocks=5))
    names = "abc"

    for name in names:
        pipeline.add(job(name, num_prompt=HEAD + 5, max_tokens=40))
        pipeline.schedule()
        pipeline.deliver()

    assert pipeline.scheduler.num_running == 3, "2 common blocks and one for each"
    pipeline.drain()
    for name in names:
        assert pipeline.outputs[name, 1] == expected_output(job(name, max_tokens=40), 40)


def test_who_waits_while_no_block_is_free_costs_no_digest() -> None:
    pipeline = Pipeline(config(num_blocks=3))
    pipeline.add(job("a", max_tokens=40))
    pipeline.schedule()
    pipeline.deliver()

    pipeline.add(job("b", max_tokens=40))
    pipeline.schedule()

    assert pipeline.scheduler.num_waiting == 1
    assert pipeline.scheduler._by_key[job("b").key].digests == []
    pipeline.deliver()
    pipeline.drain()
