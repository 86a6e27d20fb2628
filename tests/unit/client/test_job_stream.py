"""When a stream asks Postgres, and for what: no server needed, both clients only perform it."""

from __future__ import annotations

from uuid import uuid4

import msgspec
import pytest

from shardline.base.errors import Diverged, NotFound
from shardline.client.job_stream import JobStream
from shardline.contract.job import JobProgress, JobState
from shardline.contract.wire import Delta
from shardline.store.progress import ProgressQuestion
from shardline.streams import Place

JOB = uuid4()


def delta(start: int, *, fence: int = 1) -> Delta:
    return Delta(fence=fence, start=start, ids=(start,), text="a")


def stream_of(fence: int = 1) -> JobStream:
    """One that has learned the newest attempt's number."""
    stream = JobStream(JOB)
    stream.answer(JobProgress(fence=fence))
    assert stream.question is None
    return stream


def asked(stream: JobStream) -> ProgressQuestion | None:
    return stream.question


def ids_of(stream: JobStream) -> list[int]:
    return [token_id for delta in stream.take() for token_id in delta.ids]


def test_before_it_is_heard_a_stream_asks_for_the_newest_attempt() -> None:
    stream = JobStream(JOB)
    assert asked(stream) == ProgressQuestion(JOB)
    stream.answer(JobProgress(fence=2, token_ids=(0, 1)))
    stream.hear([delta(0), delta(0, fence=2)], is_away=False)
    assert (ids_of(stream), asked(stream)) == ([0], None)


def test_a_job_that_is_not_there_is_not_found() -> None:
    with pytest.raises(NotFound, match=str(JOB)):
        JobStream(JOB).answer(None)


@pytest.mark.parametrize(("has_ended", "asks"), [(None, True), (False, False), (True, True)])
def test_silence_asks_unless_ends_are_looked_for(has_ended: bool | None, asks: bool) -> None:
    stream = stream_of()
    stream.hear([], is_away=False, has_ended=has_ended)
    assert (asked(stream) is not None) == asks


def test_a_whole_stream_takes_from_postgres_nothing_but_the_end() -> None:
    stream = stream_of()
    stream.hear([], is_away=False)
    stream.answer(JobProgress(fence=1, token_ids=(0, 1)))
    assert (ids_of(stream), asked(stream)) == ([], None)
    stream.hear([], is_away=False)
    end = JobProgress(fence=1, start=2, token_ids=(2,), text="aaa", state=JobState.SUCCEEDED)
    stream.answer(end)
    assert asked(stream) == ProgressQuestion(JOB, 1), "the end needs the tokens before it"
    stream.answer(msgspec.structs.replace(end, start=0, token_ids=(0, 1, 2)))
    assert (stream.ended, ids_of(stream), asked(stream)) == (True, [0, 1, 2], None)


@pytest.mark.parametrize("is_away", [True, False], ids=["Redis away", "a gap"])
def test_tokens_that_redis_lacks_come_from_postgres_page_by_page(is_away: bool) -> None:
    stream = stream_of()
    stream.hear([] if is_away else [delta(4)], is_away=is_away, has_ended=False)
    assert asked(stream) == ProgressQuestion(JOB, 1)
    stream.answer(JobProgress(fence=1, token_ids=(0, 1), is_whole=False))
    assert asked(stream) == ProgressQuestion(JOB, 1, 2, 2)
    stream.answer(JobProgress(fence=1, start=2, token_ids=(2, 3)))
    assert asked(stream) is None
    assert ids_of(stream) == ([0, 1, 2, 3] if is_away else [0, 1, 2, 3, 4])


def test_without_postgres_the_stream_alone_must_do() -> None:
    stream = JobStream(JOB)
    stream.skip()
    stream.hear([delta(0)], is_away=False)
    assert (ids_of(stream), asked(stream)) == ([0], None)


def test_after_its_end_a_stream_asks_nothing() -> None:
    stream = stream_of()
    stream.hear([Delta(fence=1, start=0, state="succeeded")], is_away=False, has_ended=True)
    assert (stream.ended, asked(stream)) == (True, None)


def test_a_reader_that_joins_later_gets_the_text_from_postgres_at_once() -> None:
    after = Place().then([0])
    stream = JobStream(JOB, after=after, text_rule=lambda *_: lambda ids: "t" * len(ids))
    assert asked(stream) == ProgressQuestion(JOB, with_prompt_end=True)
    progress = JobProgress(fence=1, token_ids=(0, 1, 2), max_tokens=8)
    assert stream.num_texts(progress) == 3
    stream.answer(progress)
    (found,) = stream.take()
    assert (found.start, found.ids, found.text) == (1, (1, 2), "tt")


def test_other_tokens_than_were_given_are_told() -> None:
    stream = stream_of()
    stream.hear([delta(0), delta(1)], is_away=False)
    stream.hear([], is_away=True)
    with pytest.raises(Diverged):
        stream.answer(JobProgress(fence=2, token_ids=(0, 7)))
