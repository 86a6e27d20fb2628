"""The bodies of `POST /v1/decisions`. The API's description is made from these types."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import Meta

from shardline.contract.chat import Message
from shardline.contract.decision import OptionValue, Question
from shardline.contract.job import INTERACTIVE_PRIORITY, JobRequest, Priority

MAX_QUESTIONS = 400


class DecisionRequest(JobRequest, frozen=True, kw_only=True):
    """An input and the questions about it; each becomes a job. Parameters that choose a text's
    tokens are refused."""

    input: str | tuple[Message, ...]
    questions: Annotated[tuple[Question, ...], Meta(min_length=1, max_length=MAX_QUESTIONS)]
    prompt: None = None
    messages: None = None
    question: None = None
    depends_on: None = None
    """`/v1/jobs` takes them."""
    priority: Priority = INTERACTIVE_PRIORITY
    # OpenAI's, without effect: KV of a prompt's beginning is always kept.
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


class AnswerHead(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What every answer has. `label_mass` is the share of the model's distribution that all labels
    have together."""

    name: str | None
    job_id: UUID
    label_mass: float


class PredicateAnswer(AnswerHead, frozen=True, kw_only=True, tag="predicate"):
    """How likely the statement is true."""

    probability: float


class ValueProbability(msgspec.Struct, frozen=True, kw_only=True):
    """That of one choice."""

    value: OptionValue
    probability: float


class ChoiceAnswer(AnswerHead, frozen=True, kw_only=True, tag="choice"):
    """The likeliest choice, and what all of them have."""

    choice: OptionValue
    confidence: float
    probabilities: tuple[ValueProbability, ...]


class LevelProbability(msgspec.Struct, frozen=True, kw_only=True):
    """That of one level; its value is its place, from 0."""

    value: int
    label: str
    probability: float


class ScoreAnswer(AnswerHead, frozen=True, kw_only=True, tag="score"):
    """The mean of the levels, and what all of them have."""

    score: float
    confidence: float
    probabilities: tuple[LevelProbability, ...]


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What of the prompts was found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """A model does not think before it answers a question."""

    reasoning_tokens: int


class DecisionUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of all questions together."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class DecisionDocument(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="decision"
):
    """What `POST /v1/decisions` answers: one answer for each question, in their order."""

    id: str
    model: str
    answers: tuple[PredicateAnswer | ChoiceAnswer | ScoreAnswer, ...]
    usage: DecisionUsage
