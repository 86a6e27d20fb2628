"""Questions about an input as jobs, and their answers. Knows no database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardline.base.errors import Invalid
from shardline.client.requests import request_of
from shardline.contract import plain_json
from shardline.contract.chat import Message
from shardline.contract.decision import Decision, Question
from shardline.contract.job import Job, JobRequest

Input = str | Sequence[Message | Mapping[str, str]]
AnyQuestion = Question | Mapping[str, Any]


def question_requests(
    model: str,
    about: Input,
    questions: Iterable[AnyQuestion],
    fields: Mapping[str, Any],
    tenant: str,
) -> list[JobRequest]:
    """One request for each question, all of one input. Raises Invalid."""
    given = {"prompt": about} if isinstance(about, str) else {"messages": about}
    for name in ("prompt", "messages", "question", "id", "idempotency_key"):
        if name in fields:
            raise Invalid(name, "each question is a separate job", "Use submit, or leave it out")
    return [
        request_of(
            model,
            None,
            plain_json.builtins({**given, **fields, "question": question}),
            tenant,
        )
        for question in questions
    ]


def decisions_of(jobs: Iterable[Job]) -> list[Decision]:
    """The answers of jobs that have succeeded."""
    found: list[Decision] = []
    for job in jobs:
        assert job.result is not None, "a succeeded job has a result"
        assert job.result.decision is not None, "a succeeded question has an answer"
        found.append(job.result.decision)
    return found
