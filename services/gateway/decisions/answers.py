"""Stores the jobs of a decision, waits for all of them and answers. Knows no route.

A caller who disconnects cancels them, unless the request can be repeated: with an id or a key of
the caller's own the repeat finds the same jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request, Response

from services.gateway.context import Gateway
from services.gateway.decisions.bodies import (
    ChoiceAnswer,
    DecisionDocument,
    DecisionRequest,
    DecisionUsage,
    InputTokensDetails,
    LevelProbability,
    OutputTokensDetails,
    PredicateAnswer,
    ScoreAnswer,
    ValueProbability,
)
from services.gateway.decisions.requests import decision_request, naming, question_jobs
from services.gateway.errors import (
    CLIENT_CLOSED_REQUEST,
    json_response,
    respond,
)
from services.gateway.groups.group_rows import MAX_PROMPT_TOKENS, encoded_group
from services.gateway.groups.job_group import JobGroup, result_of, wait_for_group
from services.gateway.guard import Caller
from services.gateway.request_body import request_body
from services.gateway.submit import read_jobs
from shardline.base.errors import Invalid, ShardlineError
from shardline.contract.decision import Choice, Predicate, Question
from shardline.contract.job import Job, JobRequest, Result
from shardline.store.inserts import EncodedRequest
from shardline_server.failpoints import Point, failpoint
from shardline_server.tokenize import RegisteredModel


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedDecision:
    """Questions with committed jobs, in their order."""

    name: str
    request: DecisionRequest
    model: RegisteredModel
    group: JobGroup


async def decide(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """The answers to all questions, once the last one is there. Raises what `submit` raises."""
    accepted = await _store(gateway, request, caller)
    try:
        jobs = await wait_for_group(gateway, request, accepted.group)
        if jobs is None:
            response = Response(status_code=CLIENT_CLOSED_REQUEST)
        else:
            questions = accepted.request.questions
            document = decision_document(accepted.name, accepted.model.address, questions, jobs)
            response = json_response(document)
    except ShardlineError as error:
        response = respond(error)
    response.headers["x-request-id"] = accepted.name
    return response


async def _store(gateway: Gateway, request: Request, caller: Caller) -> AcceptedDecision:
    """One row for each question, all of them or none: they are choices of one request."""
    async with request_body(gateway, request) as body:
        (asked,) = await read_jobs(
            body, request, caller, lambda document: (decision_request(document),)
        )
        gateway.admission.take_places(
            request, caller.tenant, len(asked.questions), field="questions"
        )
        body.room.add_decoded(len(body.data) * len(asked.questions))
        model = await gateway.catalog.get(asked.address)
        encoded = await asyncio.to_thread(encoded_questions, model, question_jobs(asked))
        encoded = replace(encoded, key_name=caller.key_name)
        stored = await gateway.insert_batcher.insert(model.name, encoded)
        failpoint(Point.GATEWAY_INSERTED)
    return AcceptedDecision(
        name=f"decision-{stored.job_id}",
        request=asked,
        model=model,
        group=JobGroup.of(stored, asked),
    )


def encoded_questions(model: RegisteredModel, jobs: Sequence[JobRequest]) -> EncodedRequest:
    """The rows of prepared jobs. Raises Invalid, naming the question."""
    named = ((naming(place), job) for place, job in enumerate(jobs))
    return encoded_group(model, named, _too_many_tokens)


def _too_many_tokens(num_questions: int) -> Invalid:
    problem = f"the first {num_questions} have over {MAX_PROMPT_TOKENS} tokens with their input"
    return Invalid("questions", problem, "Ask them in several requests")


def decision_document(
    name: str, address: str, questions: Sequence[Question], jobs: Sequence[Job]
) -> DecisionDocument:
    """The answers to questions, from the ended job of each. Raises the reason of one without."""
    results = [result_of(job) for job in jobs]
    num_input = sum(one.usage.prompt_tokens for one in results)
    num_output = sum(one.usage.completion_tokens for one in results)
    cached = sum(one.usage.cached_tokens or 0 for one in results)
    return DecisionDocument(
        id=name,
        model=address,
        answers=tuple(map(_answer, questions, results)),
        usage=DecisionUsage(
            input_tokens=num_input,
            input_tokens_details=InputTokensDetails(cached_tokens=cached, cache_write_tokens=0),
            output_tokens=num_output,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
            total_tokens=num_input + num_output,
        ),
    )


def _answer(question: Question, result: Result) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer:
    decision = result.decision
    assert decision is not None, "a succeeded question has an answer"
    probabilities = decision.probabilities
    head: dict[str, Any] = {
        "name": question.name,
        "job_id": result.job_id,
        "label_mass": decision.label_mass,
    }
    if isinstance(question, Predicate):
        return PredicateAnswer(**head, probability=decision.probability)
    options = question.options
    pairs = list(zip(options, probabilities, strict=True))
    if isinstance(question, Choice):
        return ChoiceAnswer(
            **head,
            choice=options[probabilities.index(max(probabilities))].value,
            confidence=decision.confidence,
            probabilities=tuple(
                ValueProbability(value=option.value, probability=one) for option, one in pairs
            ),
        )
    return ScoreAnswer(
        **head,
        score=decision.score or 0.0,
        confidence=decision.confidence,
        probabilities=tuple(
            LevelProbability(value=value, label=option.text, probability=one)
            for value, (option, one) in enumerate(pairs)
        ),
    )
