"""The numbers of an answer, from the log-probabilities of its labels."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shardline.base.errors import Invalid
from shardline.contract.decision import Choice, Option, Predicate, Score, check_question, decide
from shardline.contract.request_parsing import parse_request

PREDICATE = Predicate(instructions="It rains.")
CHOICE = Choice(instructions="Which?", choices=("a", "b", True))
SCORE = Score(instructions="How much?", levels=("none", "some", "all"))


def logs(*probabilities: float) -> list[float]:
    return [math.log(one) if one else -math.inf for one in probabilities]


def test_a_predicate_has_the_probability_of_its_truth() -> None:
    found = decide(PREDICATE, logs(0.1, 0.3))
    assert found.choice == "false"
    assert found.probability == pytest.approx(0.25)
    assert found.confidence == pytest.approx(0.5)
    assert found.label_mass == pytest.approx(0.4)
    assert found.score is None


def test_a_choice_has_the_probability_of_the_likeliest() -> None:
    found = decide(CHOICE, logs(0.02, 0.02, 0.16))
    assert found.choice == "true"
    assert found.probability == pytest.approx(0.8)
    assert found.probabilities == pytest.approx((0.1, 0.1, 0.8))
    assert found.confidence == pytest.approx(0.7)


def test_a_score_is_the_mean_of_its_levels() -> None:
    found = decide(SCORE, logs(0.5, 0.25, 0.25))
    assert found.choice == "none"
    assert found.score == pytest.approx(0.75)


def test_confidence_is_none_where_all_are_alike_and_whole_where_one_is_certain() -> None:
    assert decide(CHOICE, logs(0.1, 0.1, 0.1)).confidence == pytest.approx(0)
    assert decide(CHOICE, logs(0.0, 1.0, 0.0)).confidence == 1


def test_labels_that_a_model_hardly_knows_keep_their_proportions() -> None:
    found = decide(PREDICATE, [-800.0, -800.0 + math.log(3)])
    assert found.probability == pytest.approx(0.25)
    assert found.label_mass == 0


@pytest.mark.parametrize(
    ("question", "field"),
    [
        ({"type": "wish", "instructions": "x"}, "question.type"),
        ({"type": "predicate"}, "question.instructions"),
        ({"type": "predicate", "instructions": ""}, "question.instructions"),
        ({"type": "predicate", "instructions": "x", "choices": ["a", "b"]}, "question.choices"),
        ({"type": "choice", "instructions": "x", "choices": ["a"]}, "question.choices"),
        ({"type": "choice", "instructions": "x", "choices": ["a"] * 256}, "question.choices"),
        (
            {"type": "choice", "instructions": "x", "choices": ["a", "b", "a"]},
            "question.choices[2]",
        ),
        ({"type": "choice", "instructions": "x", "choices": ["a", 5]}, "question.choices[1]"),
        ({"type": "score", "instructions": "x", "levels": ["a"] * 11}, "question.levels"),
        ({"type": "choice", "instructions": "x", "choices": ["\ud800", "b"]}, "question"),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused_by_name(
    question: dict[str, Any], field: str
) -> None:
    with pytest.raises(Invalid) as refused:
        parse_request({"model": "m", "prompt": "text", "question": question})
    assert refused.value.field == field


def test_the_size_of_a_question_is_limited() -> None:
    long = tuple(Option(value=str(n), description="x" * 4096) for n in range(255))
    with pytest.raises(Invalid, match="question: it has more than 65536 bytes"):
        check_question(Choice(instructions="Which?", choices=long))


def test_a_text_and_a_boolean_of_one_name_are_two_choices() -> None:
    check_question(Choice(instructions="Which?", choices=("true", True)))
