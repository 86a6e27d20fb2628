"""The KV rule in the scheduler: present need admits; what outgrows a pipeline goes back, and never
fails."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from shardline.contract.job import FinishReason
from shardline_scheduler.events import KvExceeded, SequenceFinished
from shardline_scheduler.kv_blocks import BLOCK_TOKENS
from shardline_scheduler.sequence import Request
from tests.simulation.pipeline import Pipeline, config, decoding, expected_output, request

LIMIT = 4 * BLOCK_TOKENS
"""Tokens in the KV of a pipeline of four blocks."""


def lasting(num_prompt: int, max_tokens: int) -> Request:
    """A job that runs to its limit."""
    jobs = (
        request(str(number), num_prompt=num_prompt, max_tokens=max_tokens) for number in count()
    )
    return next(job for job in jobs if len(expected_output(job, max_tokens)) == max_tokens)


def test_a_completion_within_the_pool_is_whole_though_its_limit_is_beyond() -> None:
    jobs = (request(str(number), num_prompt=20, max_tokens=1000) for number in count())
    job = next(job for job in jobs if len(expected_output(job, 1000)) < LIMIT - 20)
    pipeline = Pipeline(config(num_blocks=4, max_len=2000))

    pipeline.add(job)
    pipeline.drain()

    end = pipeline.ends[job.key]
    assert isinstance(end, SequenceFinished)
    assert (end.reason, list(end.output_ids)) == (FinishReason.STOP, expected_output(job, 1000))


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_a_job_that_outgrows_the_pool_goes_on_in_a_larger_one_with_the_same_tokens(
    num_lanes: int,
) -> None:
    job = lasting(num_prompt=20, max_tokens=300)
    small, large = (Pipeline(config(num_blocks=num, num_lanes=num_lanes)) for num in (4, 8))
    small.add(job)
    small.drain()
    output = tuple(small.outputs[job.key])

    large.add(replace(job, key=(job.key[0], 2), output_ids=output))
    large.drain()

    assert small.ends[job.key] == KvExceeded(key=job.key, num_tokens=LIMIT + 1)
    assert large.outputs[job.key[0], 2] == expected_output(job, 300)


@pytest.mark.parametrize("num_prompt", [LIMIT, LIMIT + 1])
def test_a_prompt_runs_if_the_pool_holds_it_and_else_goes_back_at_once(num_prompt: int) -> None:
    pipeline = Pipeline(config(num_blocks=4))
    job = request(num_prompt=num_prompt, max_tokens=1)

    pipeline.add(job)
    is_back_at_once = job.key in pipeline.ends
    pipeline.drain()

    assert is_back_at_once == (num_prompt > LIMIT)
    assert isinstance(pipeline.ends[job.key], KvExceeded if is_back_at_once else SequenceFinished)


def test_a_new_epoch_with_less_kv_gives_back_the_long_job_and_runs_the_others() -> None:
    pipeline = Pipeline(config())
    long = lasting(num_prompt=130, max_tokens=50)
    short = request("short", num_prompt=5, max_tokens=9)
    decoding(pipeline, long.key[0], num_prompt=130, max_tokens=50)
    decoding(pipeline, "short", max_tokens=9)

    pipeline.rebuild(num_blocks=2)
    pipeline.drain()

    assert pipeline.ends[long.key] == KvExceeded(
        key=long.key, num_tokens=130 + len(pipeline.outputs[long.key])
    )
    assert pipeline.outputs[short.key] == expected_output(short, 9)
