"""Questions as prompts: the input first, the question behind it, and labels of one token each."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from services.stage.model.model_info import ModelInfo
from shardline.base.errors import Invalid
from shardline.contract.chat import FunctionDefinition, Message, Tool
from shardline.contract.decision import Choice, Option, Predicate, Question, Score
from shardline.contract.job import FinishReason, JobRequest, SamplingParams
from shardline.contract.request_parsing import check_params, check_request
from shardline_server.tokenize import Tokens
from tests.real_model import real_model
from tests.tiny_head import clerk_row
from tests.unit.tokenize.small_tokenizers import byte_level, word_pieces

PREDICATE = Predicate(instructions="It is a complaint.", name="complaint")
CHOICE = Choice(
    instructions="Which queue?", choices=("billing", Option(value="bugs", description="errors"))
)
SCORE = Score(instructions="How urgent?", levels=("low", "high"))


@pytest.fixture(scope="module")
def smollm2() -> Tokens:
    return Tokens.from_row(ModelInfo.read(real_model()).row(name="smollm2", fingerprint="w"))


@pytest.fixture(scope="module")
def clerk() -> Tokens:
    return Tokens.from_row(clerk_row())


def tokens_of(tokenizer: Tokenizer, **fields: Any) -> Tokens:
    return Tokens.from_row({**clerk_row(), "tokenizer": tokenizer.to_str(), **fields})


def texts(tokens: Tokens, question: Question) -> list[str]:
    return [label.text for label in tokens.question_labels.of(question)]


def prompt_text(tokens: Tokens, question: Question, **given: Any) -> str:
    prepared = tokens.prepare(params=SamplingParams(question=question), **given)
    assert prepared.max_tokens == 1
    return str(tokens.vocabulary.decode(prepared.prompt_ids))


def test_tokens_within_a_limit_find_no_label_again(smollm2: Tokens) -> None:
    # A cache hands out such a copy for each question.
    assert smollm2.within(512).question_labels is smollm2.question_labels


def test_each_label_is_the_one_token_that_its_text_has_behind_a_line(smollm2: Tokens) -> None:
    many = Choice(instructions="Which?", choices=tuple(map(str, range(255))))
    labels = smollm2.question_labels.of(many)
    assert len({label.token_id for label in labels}) == 255
    for label in labels:
        ids = smollm2.tokenizer.encode(f"\n{label.text}").ids
        assert ids[-1] == label.token_id
        assert smollm2.tokenizer.decode(ids[-1:]) == label.text


def test_the_kinds_have_labels_that_say_what_they_mean(smollm2: Tokens, clerk: Tokens) -> None:
    assert texts(smollm2, PREDICATE) == ["Yes", "No"]
    assert texts(clerk, PREDICATE) == ["Y", "N"]
    assert texts(smollm2, CHOICE) == texts(clerk, CHOICE) == ["A", "B"]
    assert texts(smollm2, SCORE) == texts(clerk, SCORE) == ["0", "1"]


def test_more_options_than_labels_of_one_token_are_refused_with_their_number(clerk: Tokens) -> None:
    question = Choice(instructions="Which?", choices=tuple(map(str, range(60))))
    with pytest.raises(Invalid, match=r"60 options.*52 labels.*at most 52"):
        clerk.prepare(prompt="text", params=SamplingParams(question=question))


def test_a_tokenizer_without_labels_and_a_model_without_tokenizer_refuse_questions() -> None:
    for tokens in (tokens_of(word_pieces()), Tokens.from_row({**clerk_row(), "tokenizer": ""})):
        with pytest.raises(Invalid, match=r"question"):
            tokens.prepare(prompt="text", params=SamplingParams(question=PREDICATE))


def test_a_label_outside_of_the_models_vocabulary_is_none() -> None:
    # Given a model whose vocabulary ends before the token of Y
    whole = byte_level()
    before_y = whole.token_to_id("Y")
    assert before_y is not None
    tokens = tokens_of(whole, vocab_size=before_y)
    assert texts(tokens, PREDICATE) == ["A", "B"]


def test_the_input_stands_before_the_question_of_a_chat(smollm2: Tokens) -> None:
    text = prompt_text(smollm2, CHOICE, prompt="My card was charged twice.")
    assert text.endswith(
        "<|im_start|>user\nMy card was charged twice.\n\n"
        "Which queue?\nA. billing\nB. bugs: errors\n"
        "Answer with the label of the option that fits best, and nothing else.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert text == prompt_text(
        smollm2, CHOICE, messages=[Message("user", "My card was charged twice.")]
    )


def test_a_question_is_a_message_of_its_own_behind_an_answer(smollm2: Tokens) -> None:
    talk = [Message("user", "Hello"), Message("assistant", "How can I help?")]
    text = prompt_text(smollm2, PREDICATE, messages=talk)
    assert "How can I help?<|im_end|>\n<|im_start|>user\nIs this true of the above?" in text
    assert "Answer Yes if it is, No if it is not" in text


def test_a_model_without_template_gets_a_plain_prompt() -> None:
    tokens = tokens_of(byte_level(), chat_template=None)
    text = prompt_text(tokens, SCORE, prompt="Help!")
    assert text.startswith("Help!\n\nHow urgent?\n0. low\n1. high\n")
    assert text.endswith("\nAnswer:\n")


def test_questions_of_one_input_share_all_tokens_before_them(smollm2: Tokens) -> None:
    text = "A long text. " * 30
    ids = [
        smollm2.prepare(prompt=text, params=SamplingParams(question=question)).prompt_ids
        for question in (PREDICATE, CHOICE)
    ]
    num_shared = next(at for at, (a, b) in enumerate(zip(*ids, strict=False)) if a != b)
    assert num_shared >= len(smollm2.tokenizer.encode(text).ids)


def test_token_ids_take_no_question(clerk: Tokens) -> None:
    with pytest.raises(Invalid, match="prompt: a question cannot stand behind token ids"):
        clerk.prepare(prompt=(5, 6), params=SamplingParams(question=PREDICATE))


def test_an_answer_is_whole_with_its_one_token(smollm2: Tokens) -> None:
    (yes, _) = smollm2.question_labels.of(PREDICATE)
    text = smollm2.completion(SamplingParams(question=PREDICATE), max_tokens=1)
    assert text.push(yes.token_id) == ("Yes", FinishReason.STOP)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.5},
        {"logprobs": 3},
        {"stop": ("x",)},
        {"max_tokens": 2},
        {"min_tokens": 1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": (3,)},
        {"tools": (Tool(function=FunctionDefinition(name="f")),)},
        {"thinking_token_budget": 5},
        {"continue_final_message": True, "add_generation_prompt": False},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_parameters_of_a_sampled_text_are_refused_beside_a_question(fields: dict[str, Any]) -> None:
    with pytest.raises(Invalid) as refused:
        check_params(SamplingParams(question=PREDICATE, **fields))
    assert refused.value.field in fields


def test_parameters_that_choose_the_model_are_kept_beside_a_question() -> None:
    check_params(
        SamplingParams(
            question=PREDICATE,
            max_tokens=1,
            exact=True,
            adapter="legal",
            chat_template_kwargs={"enable_thinking": False},
            reasoning_effort="none",
        )
    )


def test_a_text_with_a_question_is_rendered_and_takes_variables_of_the_template() -> None:
    template = (
        "{{ messages[0]['content'] }}\n{% if enable_thinking %}<think>{% else %}A:{% endif %}\n"
    )
    tokens = tokens_of(byte_level(), chat_template=template)
    asked = JobRequest(
        model="m",
        prompt="Help!",
        question=PREDICATE,
        chat_template_kwargs={"enable_thinking": True},
    )
    prepared = tokens.prepare(prompt="Help!", params=check_request(asked).params())
    assert str(tokens.vocabulary.decode(prepared.prompt_ids)).endswith("\n<think>")


def test_a_question_survives_json() -> None:
    for question in (PREDICATE, CHOICE, SCORE):
        params = SamplingParams(question=question)
        assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params
