"""The users' load itself: what its producers, callers and readers make of a door's answers, right
and wrong ones."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace
from typing import cast
from uuid import UUID, uuid4

import httpx
import pytest
import torch

from services.stage.attention.paged_kv import KvShape, PagedKv
from shardline.base.errors import Conflict, Unavailable
from shardline.client import Client
from shardline_scheduler.kv_blocks import BLOCK_TOKENS
from tests.chaos.faults.fault import Broken
from tests.chaos.faults.migration_faults import doors_open
from tests.chaos.load.batch import LIVE_EVERY, Batch
from tests.chaos.load.callers import hear, openai_form
from tests.chaos.load.doors import TAKEN, Answer, Door, is_refusal, with_header
from tests.chaos.load.journal import Asked, Journal, Watched
from tests.chaos.load.producer import Producer
from tests.chaos.load.requests import Request, row
from tests.chaos.load.users import CLERK, SCRIBE
from tests.chaos.load.workload import Dress, of_users
from tests.chaos.stack.local_start import SECOND_KV_MIB, composed_redis
from tests.chaos.stack.local_target import LocalTarget
from tests.chaos.stack.second_model import CONTEXT, HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS

MIB = 1 << 20
KEYED = Dress(fields={"idempotency_key": "once"})


def producer(door: Door) -> Producer:
    """One behind this door, that never runs by itself."""
    return Producer(
        name="http",
        door=door,
        journal=Journal(),
        workload=of_users([CLERK]),
        numbers=count(),
        stopping=threading.Event(),
        drained=threading.Event(),
        lasts=False,
        rng=random.Random(1),
    )


def answering(*answers: Answer | Exception) -> Door:
    """A door that says this, one after the other."""
    left: Iterator[Answer | Exception] = iter(answers)

    def submit(job_id: UUID | None, request: Request) -> Answer:
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return submit


def counts(sender: Producer, asked: Asked, num_sends: int) -> list[str]:
    """What is found when this is sent so often."""
    sender.journal.ask(asked)
    for _ in range(num_sends):
        sender.send(asked)
    return [finding.count for finding in sender.journal.complaints()]


def asked_for(dress: Dress = KEYED) -> Asked:
    return Asked(id=uuid4(), number=0, door="http", dress=dress)


def test_two_equal_answers_for_one_key_give_the_journal_the_rows_id() -> None:
    job_id = uuid4()
    asked = asked_for()
    sender = producer(
        answering(Answer(job_id=job_id, is_new=True), Answer(job_id=job_id, is_new=False))
    )
    assert counts(sender, asked, 2) == []
    assert asked.id == job_id
    assert [each.id for each in sender.journal.open()] == [job_id]
    assert asked.promised


@pytest.mark.parametrize(
    ("second", "found"),
    [
        pytest.param(
            Conflict("another model or prompt"), ["conflicts"], id="an equal repeat is a conflict"
        ),
        pytest.param(
            Answer(job_id=uuid4(), is_new=False), ["duplicated"], id="a repeat makes a second job"
        ),
        pytest.param(TAKEN, [], id="a door that only takes it"),
        pytest.param(Unavailable("away"), [], id="a door that is away"),
    ],
)
def test_a_wrong_answer_to_a_repeated_request_is_counted(
    second: Answer | Exception, found: list[str]
) -> None:
    asked = asked_for()
    assert (
        counts(producer(answering(Answer(job_id=uuid4(), is_new=True), second)), asked, 2) == found
    )
    assert asked.is_unsure == isinstance(second, Unavailable)


def test_an_accepted_request_called_new_again_is_counted() -> None:
    job_id = uuid4()
    door = answering(Answer(job_id=job_id, is_new=True), Answer(job_id=job_id, is_new=True))
    assert counts(producer(door), asked_for(), 2) == ["mistold"]


def test_another_id_than_the_requests_own_counts_as_a_second_job() -> None:
    assert counts(producer(answering(Answer(job_id=uuid4()))), asked_for(Dress()), 1) == [
        "duplicated"
    ]


def test_a_repeat_called_new_after_a_lost_answer_is_no_finding() -> None:
    door = answering(Unavailable("unknown"), Answer(job_id=uuid4(), is_new=True))
    assert counts(producer(door), asked_for(), 2) == []


@pytest.mark.parametrize(
    ("status", "refused"), [(400, True), (500, True), (429, False), (503, False)]
)
def test_a_refused_good_request_is_counted_unless_the_door_is_busy(
    status: int, refused: bool
) -> None:
    request = httpx.Request("POST", "http://gateway/v1/jobs")
    error = httpx.HTTPStatusError(
        "no", request=request, response=httpx.Response(status, request=request)
    )
    assert is_refusal(error) == refused
    assert counts(producer(answering(error)), asked_for(), 1) == (["refused"] if refused else [])


def test_a_key_is_a_header_over_http() -> None:
    body, headers = with_header({"model": "clerk", "idempotency_key": "once"})
    assert (body, headers) == ({"model": "clerk"}, {"Idempotency-Key": "once"})


def test_our_requests_take_openais_form_for_openais_routes() -> None:
    assert openai_form({"prompt": "a", "max_tokens": 3}) == (
        "/v1/completions",
        {"prompt": "a", "max_tokens": 3},
    )
    assert openai_form({"prompt": "a", "logprobs": 3})[1] == {
        "prompt": "a",
        "logprobs": 3,
        "max_tokens": -1,
    }
    route, body = openai_form({"messages": [], "logprobs": 3})
    assert (route, body) == (
        "/v1/chat/completions",
        {"messages": [], "logprobs": True, "top_logprobs": 3},
    )


@pytest.mark.parametrize(
    "said", [lambda text: {"text": text}, lambda text: {"delta": {"content": text}}]
)
def test_tokens_text_and_the_end_are_read_from_chunks(
    said: Callable[[str], dict[str, object]],
) -> None:
    watched = Watched(job_id=uuid4())
    for choice in ({**said("a"), "token_ids": [1]}, {**said("b"), "token_ids": [2, 3]}):
        hear(watched, {"choices": [{**choice, "finish_reason": None}]})
        assert not watched.end_state
    hear(watched, {"choices": [{**said(""), "token_ids": [], "finish_reason": "length"}]})
    hear(watched, {"choices": [], "usage": {}})
    assert (watched.tokens, watched.text) == ([1, 2, 3], "ab")
    assert (watched.end_state, watched.end_tokens) == ("succeeded", [1, 2, 3])


def test_a_row_loses_nothing_of_its_request() -> None:
    for number, request in enumerate(of_users([CLERK]).requests):
        values = row({**request, "metadata": {"n": number}, "delay_s": 2.0}, None)
        prompt = values["prompt"] if values["prompt_ids"] is None else values["prompt_ids"]
        messages = (
            {} if values["messages"] is None else {"messages": json.loads(values["messages"])}
        )
        text = {} if prompt is None else {"prompt": prompt}
        policy = {} if values["retry"] is None else {"retry": json.loads(values["retry"])}
        assert {
            "model": values["model"],
            **text,
            **policy,
            **messages,
            **json.loads(values["params"]),
        } == dict(request)
        assert (values["delay_s"], values["max_crashes"]) == (2.0, 3)


def test_the_redis_of_compose_has_a_memory_limit_and_a_policy() -> None:
    found = composed_redis()
    assert found["maxmemory"].endswith("mb")
    assert found["maxmemory-policy"]


def test_a_bulk_load_sent_twice_stores_each_row_once_and_cancels_held_rows(
    database_url: str, redis_url: str
) -> None:
    journal = Journal()
    stopping = threading.Event()
    drained = threading.Event()
    with Client(database_url=database_url, redis_url=redis_url) as client:
        batch = Batch(
            client=client,
            journal=journal,
            workload=of_users([CLERK]),
            num_rows=2 * LIVE_EVERY,
            name="bulk",
            stopping=stopping,
            drained=drained,
        )
        stopping.set()
        thread = threading.Thread(target=batch.run)
        thread.start()
        assert batch.is_done.wait(60)
        drained.set()
        thread.join()
        states = Counter(str(job.state) for job in client.list(limit=3 * LIVE_EVERY))
    assert journal.complaints() == []
    assert states == {"cancelled": 2 * (LIVE_EVERY - 1), "queued": 2}
    assert len(batch.held) == states["cancelled"]
    assert len(journal.open("batch")) == states["queued"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_second_models_kv_holds_its_limit_and_part_of_its_context(
    dtype: torch.dtype,
) -> None:
    shape = KvShape(num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, value_head_dim=HEAD_DIM)
    block_bytes = PagedKv.bytes_per_block(dict.fromkeys(range(NUM_LAYERS), shape), dtype)
    kv_bytes = SECOND_KV_MIB[str(dtype).removeprefix("torch.")] * MIB
    assert kv_bytes // block_bytes * BLOCK_TOKENS == SCRIBE.limit < CONTEXT


@pytest.mark.parametrize(
    ("answers", "is_broken"),
    [
        pytest.param([TAKEN] * 4, False, id="repeats that are answered"),
        pytest.param([Unavailable("a lock"), TAKEN], False, id="a lock, once"),
        pytest.param([Unavailable("a lock")] * 2, True, id="no answer twice"),
    ],
)
def test_only_a_missing_answer_fails_a_request_repeated_during_a_migration(
    answers: list[Answer | Exception], is_broken: bool
) -> None:
    sender = producer(answering(*answers))
    target = cast(LocalTarget, SimpleNamespace(journal=sender.journal))
    with pytest.raises(Broken) if is_broken else nullcontext(), doors_open(target):
        assert counts(sender, asked_for(), len(answers)) == []


def test_a_request_that_had_no_answer_before_a_migration_does_not_count_against_it() -> None:
    lost = [Unavailable("a restart")] * 3
    sender = producer(answering(*lost, Answer(job_id=uuid4(), is_new=True)))
    target = cast(LocalTarget, SimpleNamespace(journal=sender.journal))
    asked = asked_for()
    assert counts(sender, asked, len(lost)) == []
    with doors_open(target):
        sender.send(asked)
    assert (asked.num_unanswered, asked.promised) == (len(lost), True)
