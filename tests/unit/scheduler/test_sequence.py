"""The waiting line, the replay of a checkpoint, and what a sequence may hold at most."""

from __future__ import annotations

from operator import attrgetter

import pytest

from shardline.contract.job import FinishReason, SamplingParams, TokenLogprob
from shardline_scheduler.sequence import Request, Sequence, WaitingQueue
from tests.simulation.pipeline import Numbers, request
from tests.simulation.stages import EOS


def sequence(job: Request, arrival: int = 0, max_len: int = 512) -> Sequence:
    return Sequence(job, Numbers(job.params.max_tokens or 1), arrival=arrival, max_len=max_len)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "max_len", "most_blocks"),
    [(60, 4, 512, 1), (60, 5, 512, 2), (60, 1000, 256, 4)],
)
def test_a_sequence_never_holds_more_than_its_limits_need(
    num_prompt: int, max_tokens: int, max_len: int, most_blocks: int
) -> None:
    job = request(num_prompt=num_prompt, max_tokens=max_tokens)

    assert sequence(job, max_len=max_len).most_blocks == most_blocks


def test_a_replay_stops_at_the_token_that_ends_the_completion() -> None:
    replayed = sequence(request(output_ids=(3, EOS, 4)))

    assert replayed.replay() is FinishReason.STOP
    assert replayed.output_ids == (3, EOS)


def test_a_replay_restores_logprobs() -> None:
    logprobs = (TokenLogprob(3, -0.5), TokenLogprob(4, -0.25))
    plain = request(output_ids=(3, 4), logprobs=0)
    replayed = sequence(
        Request(
            key=plain.key,
            prompt_ids=plain.prompt_ids,
            params=plain.params,
            seed=plain.seed,
            output_ids=plain.output_ids,
            output_logprobs=logprobs,
        )
    )

    assert replayed.replay() is None
    assert tuple(replayed.logprobs) == logprobs


def test_the_line_is_kept_by_priority_then_arrival() -> None:
    waiting = WaitingQueue()
    line = [
        sequence(request(priority=priority), arrival)
        for arrival, priority in enumerate([5, 3, 5, 0])
    ]
    for one in line:
        waiting.push(one)

    order = []
    foremost = waiting.first(3, with_quarantined=True)
    while first := waiting.first(1, with_quarantined=True):
        waiting.remove(first[0])
        order.append(first[0].order)

    assert order == [(0, 3), (3, 1), (5, 0), (5, 2)]
    assert [one.order for one in foremost] == order[:3]


def test_anyone_can_leave_the_line() -> None:
    waiting = WaitingQueue()
    line = [sequence(request(), arrival) for arrival in range(5)]
    for one in line:
        waiting.push(one)

    waiting.remove(line[3])
    waiting.remove(line[0])

    assert waiting.first(1, with_quarantined=False) == [line[1]]


def test_a_suspect_waits_aside() -> None:
    waiting = WaitingQueue()
    suspect = sequence(request(quarantined=True), 0)
    other = sequence(request(), 1)
    waiting.push(suspect)
    waiting.push(other)

    assert waiting.first(2, with_quarantined=True) == [suspect, other]
    assert waiting.first(2, with_quarantined=False) == [other]


def test_the_youngest_of_the_lowest_priority_ranks_last() -> None:
    line = [
        sequence(request(priority=priority), arrival)
        for arrival, priority in enumerate([5, 7, 7, 6])
    ]

    assert max(line, key=attrgetter("order")) is line[2]


def test_eos_ends_a_completion_unless_it_is_ignored() -> None:
    assert SamplingParams(stop_token_ids=(9,)).stop_ids({2}) == {2, 9}
    assert SamplingParams(stop_token_ids=(9,), ignore_eos=True).stop_ids({2}) == {9}
