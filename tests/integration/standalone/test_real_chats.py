"""A chat model with trained weights behind the whole service: what OpenAI's client gets is what
transformers writes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
import transformers as tf
from openai import BadRequestError, OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionUserMessageParam
from pydantic import BaseModel, Field

from shardline.client import Client
from tests.real_model import NAME, real_model
from tests.stack import Stack

NUM_NEW = 32
QUESTIONS = (
    "What is the capital of Italy?",
    "Write the numbers from 1 to 9, one on each line.",
    "Repeat exactly: 日本語 🐱🐶 naïve Ελλάδα",
    "Écris une phrase sur la mer.",
    "Write a Python function that adds two numbers.",
    "Reply with three emojis.",
)
LINES = QUESTIONS[1]


@pytest.fixture(scope="module")
def stack(real_stack: Stack) -> Stack:
    return real_stack


def messages(question: str) -> list[ChatCompletionMessageParam]:
    return [ChatCompletionUserMessageParam(role="user", content=question)]


@pytest.fixture(scope="module")
def expected(reference: Any) -> Callable[[str], str]:
    """Greedy, in float32, alone, by transformers' own `generate` and tokenizer."""
    tokenizer = tf.AutoTokenizer.from_pretrained(real_model())

    @cache
    def answer(question: str) -> str:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        ids = torch.tensor([prompt])
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False
        )
        return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    return answer


def whole(openai: OpenAI, question: str) -> str | None:
    answer = openai.chat.completions.create(
        model=NAME, messages=messages(question), max_tokens=NUM_NEW, temperature=0
    )
    return answer.choices[0].message.content


def pieces(openai: OpenAI, question: str, stop: list[str] | None = None) -> list[str]:
    chunks = openai.chat.completions.create(
        model=NAME,
        messages=messages(question),
        max_tokens=NUM_NEW,
        temperature=0,
        stop=stop,
        stream=True,
    )
    return [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_chat_has_the_text_of_transformers_whole_and_in_pieces(
    question: str, openai: OpenAI, expected: Callable[[str], str]
) -> None:
    assert whole(openai, question) == expected(question)
    streamed = pieces(openai, question)
    assert "".join(streamed) == expected(question)
    assert len(streamed) > len(expected(question).split()) // 2, "it came in pieces"


def test_chats_at_once_have_the_texts_of_chats_alone(
    openai: OpenAI, expected: Callable[[str], str]
) -> None:
    with ThreadPoolExecutor(len(QUESTIONS)) as threads:
        found = list(threads.map(lambda question: whole(openai, question), QUESTIONS * 2))

    assert found == [expected(question) for question in QUESTIONS] * 2


class Person(BaseModel):
    """What a test asks for."""

    name: str
    age: int = Field(ge=0, le=120)
    languages: list[str] = Field(max_length=3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema_holds_whatever_the_model_would_say(openai: OpenAI, temperature: float) -> None:
    for seed in range(4):
        answers = [
            openai.chat.completions.parse(
                model=NAME,
                messages=messages("Describe a person you like."),
                response_format=Person,
                temperature=temperature,
                seed=seed,
                max_tokens=400,
            )
            for _ in range(2)
        ]
        assert answers[0].choices[0].message.parsed is not None
        assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
        assert answers[0].choices[0].finish_reason == "stop"


def test_a_choice_is_made_at_every_door(stack: Stack, openai: OpenAI) -> None:
    asked = {"choice": ["positive", "negative"]}
    chat = openai.chat.completions.create(
        model=NAME,
        messages=messages("Is this review positive? I loved it."),
        extra_body={"structured_outputs": asked},
    )
    assert chat.choices[0].message.content in asked["choice"]
    with Client(database_url=stack.urls["database"], redis_url=stack.urls["redis"]) as client:
        job = client.submit(NAME, prompt="I loved it. This is", structured_outputs=asked)
        result = client.wait(job, timeout_s=120).result
    assert result is not None
    assert result.text in asked["choice"]


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "integer", "minimum": 3, "maximum": 2}, "Unsatisfiable"),
        ({"not": {"type": "string"}}, "Unimplemented"),
        ({"type": "nothing"}, "nothing"),
    ],
)
def test_a_schema_that_cannot_be_held_is_refused_at_the_door(
    openai: OpenAI, schema: dict[str, object], problem: str
) -> None:
    with pytest.raises(BadRequestError, match=problem):
        openai.chat.completions.create(
            model=NAME,
            messages=messages("A number."),
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "number", "schema": schema, "strict": True},
            },
        )


def test_a_stop_of_several_tokens_ends_the_text_before_it(
    openai: OpenAI, expected: Callable[[str], str]
) -> None:
    before, stop, after = expected(LINES).partition("4, 5")
    assert before
    assert after, "the model wrote no such thing"

    assert "".join(pieces(openai, LINES, stop=[stop])) == before
