"""Questions that a model answers with probabilities instead of text, and the numbers of an answer.

A question is a job like any other: one row, one prefill, one result. Knows no tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from shardline.base.errors import Invalid

FIELD = "question"
MAX_CHOICES = 255
MAX_LEVELS = 10
MAX_QUESTION_BYTES = 64 << 10
"""As JSON. It is kept with its job, and is a part of its prompt."""

Instructions = Annotated[str, Meta(min_length=1, max_length=16 << 10)]
QuestionName = Annotated[str, Meta(min_length=1, max_length=64)]
OptionText = Annotated[str, Meta(min_length=1, max_length=1024)]
Description = Annotated[str, Meta(max_length=4096)]
OptionValue = OptionText | bool


class Option(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One of the answers that a question allows."""

    value: OptionValue
    description: Description | None = None

    @property
    def text(self) -> str:
        """Its value as the model and SQL see it."""
        return self.value if isinstance(self.value, str) else str(self.value).lower()


class Level(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One grade of a score; its number is its place, from 0."""

    label: OptionText
    description: Description | None = None


class QuestionHead(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="type",
):
    """What every question has. `name` is the caller's, and is returned."""

    instructions: Instructions
    name: QuestionName | None = None


class Predicate(QuestionHead, frozen=True, kw_only=True, tag="predicate"):
    """How likely a statement about the input is true."""

    @property
    def options(self) -> tuple[Option, ...]:
        """True, then false."""
        return Option(value=True), Option(value=False)


class Choice(QuestionHead, frozen=True, kw_only=True, tag="choice"):
    """Which of some options fits the input. A text or a boolean stands for an option without
    description."""

    choices: Annotated[
        tuple[Option | OptionText | bool, ...], Meta(min_length=2, max_length=MAX_CHOICES)
    ]

    @property
    def options(self) -> tuple[Option, ...]:
        """Its choices, in their order."""
        return tuple(one if isinstance(one, Option) else Option(value=one) for one in self.choices)


class Score(QuestionHead, frozen=True, kw_only=True, tag="score"):
    """Which of some ordered levels fits the input, the lowest first. A text stands for a level
    without description."""

    levels: Annotated[tuple[Level | OptionText, ...], Meta(min_length=2, max_length=MAX_LEVELS)]

    @property
    def options(self) -> tuple[Option, ...]:
        """Its levels, in their order."""
        return tuple(
            Option(value=one)
            if isinstance(one, str)
            else Option(value=one.label, description=one.description)
            for one in self.levels
        )


Question = Predicate | Choice | Score


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a question, as `results` has it in columns.

    `probabilities` are those of the options in their order, of a predicate true and false; they add
    up to 1. `confidence` is 0 where all are alike, 1 where one is certain.
    """

    choice: str
    """The likeliest option: a choice's value, a level's label, `true` or `false`."""
    probability: float
    """Of a predicate that it is true; of others that of the likeliest option."""
    confidence: float
    score: float | None = None
    """Of levels their mean, numbered from 0, by probability."""
    probabilities: tuple[float, ...]
    label_mass: float
    """The share of the model's own distribution that the options' labels have together: near 0, the
    model would have answered with something else."""


def check_question(question: Question) -> None:
    """Checks what types cannot express. Raises Invalid."""
    try:
        num_bytes = len(msgspec.json.encode(question))
    except UnicodeEncodeError as error:
        raise Invalid(FIELD, "it holds a lone surrogate", "Send whole characters") from error
    if num_bytes > MAX_QUESTION_BYTES:
        problem = f"it has more than {MAX_QUESTION_BYTES} bytes as JSON"
        raise Invalid(FIELD, problem, "Shorten it, or ask several questions")
    if isinstance(question, Choice):
        values = [(type(one.value), one.value) for one in question.options]
        for place, value in enumerate(values):
            if value in values[:place]:
                problem = "it is the value of another choice too"
                raise Invalid(f"{FIELD}.choices[{place}]", problem, "Name each choice once")


def decide(question: Question, logprobs: Sequence[float]) -> Decision:
    """Returns the numbers of an answer from the log-probabilities of its options' labels, in their
    order; at least one is finite."""
    options = question.options
    peak = max(logprobs)
    weights = [math.exp(one - peak) for one in logprobs]
    total = math.fsum(weights)
    probabilities = tuple(one / total for one in weights)
    best = logprobs.index(peak)
    uniform = 1 / len(options)
    is_score = isinstance(question, Score)
    return Decision(
        choice=options[best].text,
        probability=probabilities[0 if isinstance(question, Predicate) else best],
        confidence=(probabilities[best] - uniform) / (1 - uniform),
        score=math.fsum(at * one for at, one in enumerate(probabilities)) if is_score else None,
        probabilities=probabilities,
        label_mass=min(math.exp(peak) * total, 1.0),
    )
