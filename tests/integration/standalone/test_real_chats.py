"""A chat model with trained weights behind the whole service: what OpenAI's client gets is what
transformers writes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
import transformers as tf
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionUserMessageParam

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
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {"SHARDLINE_MODEL": str(real_model()), "SHARDLINE_MODEL_NAME": NAME}
    stack = Stack(tmp_path_factory.mktemp("real"), **settings)
    stack.start()
    yield stack
    stack.end()
    assert stack.left() == []


@pytest.fixture(scope="module")
def openai(stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.urls['gateway']}/v1", api_key=stack.urls["api_key"]) as openai:
        yield openai


def messages(question: str) -> list[ChatCompletionMessageParam]:
    return [ChatCompletionUserMessageParam(role="user", content=question)]


@cache
def expected(question: str) -> str:
    """Greedy, in float32, alone, by transformers' own `generate` and tokenizer."""
    folder = real_model()
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    model = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False
    )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


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
    question: str, openai: OpenAI
) -> None:
    assert whole(openai, question) == expected(question)
    streamed = pieces(openai, question)
    assert "".join(streamed) == expected(question)
    assert len(streamed) > len(expected(question).split()) // 2, "it came in pieces"


def test_chats_at_once_have_the_texts_of_chats_alone(openai: OpenAI) -> None:
    with ThreadPoolExecutor(len(QUESTIONS)) as threads:
        found = list(threads.map(lambda question: whole(openai, question), QUESTIONS * 2))

    assert found == [expected(question) for question in QUESTIONS] * 2


def test_a_stop_of_several_tokens_ends_the_text_before_it(openai: OpenAI) -> None:
    before, stop, after = expected(LINES).partition("4, 5")
    assert before
    assert after, "the model wrote no such thing"

    assert "".join(pieces(openai, LINES, stop=[stop])) == before
