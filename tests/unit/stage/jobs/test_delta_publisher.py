"""The head's thread for streams: what waits is written as few deltas, which say the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from uuid import UUID, uuid4

from hypothesis import given
from hypothesis import strategies as st

from services.stage.jobs.delta_publisher import MAX_JOINED, DeltaPublisher, join
from shardline.contract.job import TokenLogprob
from shardline.contract.wire import Delta
from shardline.streams import Cursor

JOBS = (uuid4(), uuid4())


class Sink:
    """Keeps what a publisher wrote."""

    def __init__(self) -> None:
        self.writes: list[list[tuple[UUID, Delta]]] = []

    def write(self, batch: Sequence[tuple[UUID, Delta]]) -> None:
        self.writes.append(list(batch))


def token(start: int, *, fence: int = 1) -> Delta:
    return Delta(fence=fence, start=start, ids=(start,), text=f"{start} ")


def test_a_jobs_waiting_tokens_travel_as_one_delta_of_bounded_size() -> None:
    sink = Sink()
    publisher = DeltaPublisher(sink)
    one, other = JOBS
    num = MAX_JOINED + 6
    for start in range(num):
        publisher.delta(one, token(start))
        publisher.delta(other, token(start))
    publisher.delta(one, Delta(fence=1, start=num, state="succeeded", finish_reason="stop"))
    publisher.stop()
    publisher.run()

    (batch,) = sink.writes
    deltas = [delta for job_id, delta in batch if job_id == one]
    assert [len(delta.ids) for delta in deltas] == [MAX_JOINED, 6, 0]
    assert deltas[0].text == "".join(f"{start} " for start in range(MAX_JOINED))
    assert deltas[1].start == MAX_JOINED
    assert deltas[2].state == "succeeded"
    assert [len(delta.ids) for job_id, delta in batch if job_id == other] == [MAX_JOINED, 6]


def test_tokens_of_two_attempts_stay_apart() -> None:
    job_id = JOBS[0]
    batch = [(job_id, token(0)), (job_id, token(1)), (job_id, token(1, fence=2))]
    assert [(delta.fence, delta.ids) for _, delta in join(batch)] == [(1, (0, 1)), (2, (1,))]


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[UUID, Delta]]:
    """Two jobs' deltas of one to three tokens in turns, with holes, log-probabilities, ends."""
    starts = dict.fromkeys(JOBS, 0)
    ended: set[UUID] = set()
    batch = []
    for _ in range(draw(st.integers(1, 60))):
        job_id = draw(st.sampled_from(JOBS))
        if job_id in ended:
            continue
        start = starts[job_id] + draw(st.sampled_from((0, 0, 0, 0, 1)))
        ids = tuple(range(start, start + draw(st.integers(1, 3))))
        logprobs = tuple(TokenLogprob(token_id, -0.5) for token_id in ids)
        state = "succeeded" if draw(st.integers(0, 9)) == 0 else None
        batch.append(
            (
                job_id,
                Delta(
                    fence=1,
                    start=start,
                    ids=ids,
                    text="x" * len(ids),
                    logprobs=draw(st.sampled_from((None, logprobs))),
                    state=state,
                ),
            )
        )
        starts[job_id] = start + len(ids)
        if state:
            ended.add(job_id)
    return batch


def read(batch: Sequence[tuple[UUID, Delta]], job_id: UUID) -> list[Delta]:
    cursor = Cursor()
    for owner, delta in batch:
        if owner == job_id:
            cursor.push(delta)
    return cursor.take()


@given(batches())
def test_readers_get_the_same_tokens_text_and_ends(batch: list[tuple[UUID, Delta]]) -> None:
    joined = join(batch)
    assert len(joined) <= len(batch)
    for job_id in JOBS:
        plain, fewer = read(batch, job_id), read(joined, job_id)
        for deltas in (plain, fewer):
            assert all(one.next == other.start for one, other in pairwise(deltas))
        assert [i for delta in plain for i in delta.ids] == [i for d in fewer for i in d.ids]
        assert "".join(d.text for d in plain) == "".join(d.text for d in fewer)
        assert [p for d in plain for p in d.logprobs or ()] == [
            p for d in fewer for p in d.logprobs or ()
        ]
        assert [d.state for d in plain if d.state] == [d.state for d in fewer if d.state]
