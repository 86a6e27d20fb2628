"""What a claimed row becomes: a text that goes on behind its prompt, or a failure of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine as Database

from services.stage.adapters.peft import AdapterFolder
from services.stage.engine.executor import Executor
from services.stage.jobs.attempt_spans import AttemptSpans
from services.stage.jobs.chat_replies import ReplyColumns
from services.stage.jobs.engine_requests import EngineRequests
from shardline.base.config import Times
from shardline.contract.chat import Message
from shardline.contract.decision import Predicate
from shardline.contract.job import FinishReason, JobState, SamplingParams
from shardline.store import jobs
from shardline_server.tokenize import Tokens
from shardline_server.tracing import OFF
from tests.integration.rows import request, running
from tests.integration.stage.jobs.lone_head import LoneHead, open_lone_head
from tests.models import VOCAB_SIZE
from tests.unit.tokenize.small_tokenizers import byte_fallback, byte_level, id_of

TIMES = Times().scaled(0.2)


@pytest.fixture
def head(database: Database, executor: Executor, redis_url: str) -> Iterator[LoneHead]:
    with open_lone_head(database, executor, redis_url, TIMES) as head:
        yield head


def test_a_job_with_an_id_that_the_model_does_not_have_fails_alone(head: LoneHead) -> None:
    prompts = [(5, VOCAB_SIZE), (5, 6)]
    wanted = [request(max_tokens=4, ignore_eos=True, seed=5) for _ in prompts]
    with head.database.begin() as connection:
        stored = jobs.insert_jobs(connection, wanted, prepared=[(prompt, 4) for prompt in prompts])
    ids = [one.job_id for one in stored]
    for job_id in ids:
        head.offer(job_id)

    left = set(ids)
    while left:
        job_id, verdict = head.verdict()
        left -= {job_id} if verdict != "started" else set()

    with head.database.begin() as connection:
        strange, innocent = jobs.get_jobs(connection, ids)
    assert (strange.state, innocent.state) == (JobState.FAILED, JobState.SUCCEEDED)
    assert strange.error is not None
    assert (
        f"token id {VOCAB_SIZE} is not in the vocabulary of {VOCAB_SIZE}"
        in strange.error["problem"]
    )
    assert (strange.crashes, innocent.fence) == (0, 1)


def test_a_rows_text_goes_on_behind_its_prompt_and_stages_see_no_parameters_of_texts(
    database: Database,
) -> None:
    tokenizer = byte_fallback()
    hello = id_of(tokenizer, "▁hello")
    world = id_of(tokenizer, "▁world")
    params = SamplingParams(
        skip_special_tokens=False, chat_template_kwargs={"enable_thinking": False}
    )
    row = replace(running(database), prompt_ids=(hello,), params=params)
    requests = EngineRequests(
        tokens=Tokens(
            model="m",
            tokenizer_json=tokenizer.to_str(),
            chat_template=None,
            special_tokens={},
            context_length=64,
            vocab_size=tokenizer.get_vocab_size(),
            eos_ids=(),
        ),
        adapters=AdapterFolder(None, {}, Path()),
        spans=AttemptSpans(OFF),
    )

    asked, text = requests.build(row)

    assert [text.push(token)[0] for token in (world, id_of(tokenizer, "<|end|>"))] == [
        " world",
        "<|end|>",
    ]
    assert (asked.params.chat_template_kwargs, asked.params.skip_special_tokens) == ({}, True)


def test_a_questions_answer_is_its_label_though_the_prompt_has_begun_to_think(
    database: Database,
) -> None:
    tokenizer = byte_level()
    template = "{{ messages[0]['content'] }}<think>"
    tokens = Tokens(
        model="m",
        tokenizer_json=tokenizer.to_str(),
        chat_template=template,
        special_tokens={},
        context_length=512,
        vocab_size=tokenizer.get_vocab_size(),
        eos_ids=(),
    )
    question = Predicate(instructions="It is late.")
    params = SamplingParams(question=question)
    prepared = tokens.prepare(messages=[Message("user", "Noon.")], params=params)
    row = replace(
        running(database),
        prompt_ids=prepared.prompt_ids,
        params=params,
        max_tokens=prepared.max_tokens,
        is_chat=True,
    )
    requests = EngineRequests(
        tokens=tokens, adapters=AdapterFolder(None, {}, Path()), spans=AttemptSpans(OFF)
    )

    asked, text = requests.build(row)
    yes, no = (label.token_id for label in tokens.question_labels.of(question))
    answer, reason = text.push(yes)

    assert (asked.labels, asked.refusal) == ((yes, no), "")
    assert (asked.params.question, asked.params.logprobs) == (None, 0)
    assert asked.params.structured_outputs is None
    assert (answer, reason) == ("Y", FinishReason.STOP)
    assert requests.replies.read(row, answer, (yes,)) == ReplyColumns()
