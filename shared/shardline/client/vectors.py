"""Texts for encoders as jobs, and their vectors or scores. Knows no database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardline.base.errors import Invalid
from shardline.client.requests import request_of
from shardline.contract.job import Job, JobRequest

AnyText = str | Sequence[int]
OWN = ("prompt", "messages", "document", "id", "idempotency_key")


def text_requests(
    model: str, texts: Iterable[AnyText], fields: Mapping[str, Any], tenant: str
) -> list[JobRequest]:
    """One request for each text. Raises Invalid."""
    _check(fields)
    return [request_of(model, text, fields, tenant) for text in texts]


def pair_requests(
    model: str, query: str, documents: Iterable[str], fields: Mapping[str, Any], tenant: str
) -> list[JobRequest]:
    """One request for each document, all with one query. Raises Invalid."""
    _check(fields)
    return [request_of(model, query, {**fields, "document": one}, tenant) for one in documents]


def vectors_of(jobs: Iterable[Job]) -> list[tuple[float, ...]]:
    """The vectors of jobs that have succeeded. Raises Invalid if a model made none."""
    found: list[tuple[float, ...]] = []
    for job in jobs:
        assert job.result is not None, "a succeeded job has a result"
        if job.result.embedding is None:
            raise Invalid("model", f"{job.model} makes no embeddings", "Name one that does")
        found.append(job.result.embedding)
    return found


def scores_of(jobs: Iterable[Job]) -> list[float]:
    """The scores of jobs that have succeeded. Raises Invalid if a model made none."""
    found: list[float] = []
    for job in jobs:
        assert job.result is not None, "a succeeded job has a result"
        if job.result.score is None:
            raise Invalid("model", f"{job.model} scores no pairs", "Name one that does")
        found.append(job.result.score)
    return found


def _check(fields: Mapping[str, Any]) -> None:
    for name in OWN:
        if name in fields:
            raise Invalid(name, "each text is a separate job", "Use submit, or leave it out")
