"""Turns what a caller passes into checked requests, and an ended job into its error. Knows no
database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

import msgspec

from shardline.base.config import Settings
from shardline.base.errors import Invalid, JobCancelled, JobEnded, JobExpired, JobFailed, NotFound
from shardline.contract import plain_json
from shardline.contract.ids import JobId, as_id
from shardline.contract.job import DEFAULT_TENANT, Job, JobRequest, JobState
from shardline.contract.request_parsing import parse_request
from shardline.store.listing import PageEnd

MAX_REQUESTS = 100_000
"""Of one call, which is one transaction."""

AnyRequest = JobRequest | Mapping[str, Any]


def request_of(
    model: str, prompt: str | Sequence[int] | None, fields: Mapping[str, Any], tenant: str
) -> JobRequest:
    """One request from keyword arguments. Raises Invalid, naming the field."""
    document: dict[str, Any] = {"tenant": tenant, **fields, "model": model}
    if prompt is not None:
        document["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
    return parse_request(document)


def checked(requests: Iterable[AnyRequest], tenant: str) -> list[JobRequest]:
    """Many requests, each a JobRequest or its fields. Raises Invalid, naming the place of the first
    wrong one."""
    found: list[JobRequest] = []
    for place, request in enumerate(requests):
        if place == MAX_REQUESTS:
            raise Invalid(
                "requests", f"there are more than {MAX_REQUESTS}", "Send them in several calls"
            )
        try:
            found.append(_checked(request, tenant))
        except Invalid as error:
            raise Invalid(
                f"requests[{place}].{error.field}", error.problem, error.remedy
            ) from error
    return found


def _checked(request: AnyRequest, tenant: str) -> JobRequest:
    if not isinstance(request, JobRequest):
        return parse_request({"tenant": tenant, **request})
    # Made by its constructor, which checks nothing.
    document = {**msgspec.structs.asdict(request), "messages": _plain_messages(request.messages)}
    if request.tenant == DEFAULT_TENANT:
        document["tenant"] = tenant
    return parse_request(document)


def _plain_messages(messages: object) -> object:
    try:
        return plain_json.builtins(messages)
    except (TypeError, ValueError) as error:
        raise Invalid(
            "messages", f"they cannot be written as JSON: {error}", "Send role and content"
        ) from error


def check_all_exist(wanted: Iterable[UUID], found: Iterable[Job]) -> None:
    """Checks that no caller waits for a job that is not there. Raises NotFound, naming one."""
    missing = set(wanted) - {job.id for job in found}
    if missing:
        raise NotFound(f"no job has the id {min(missing)}")


def succeeded(job: Job) -> Job:
    """The job, if it succeeded. Raises JobFailed, JobCancelled or JobExpired with the recorded
    reason."""
    if job.state is not JobState.SUCCEEDED:
        raise error_of(job.state, f"job {job.id}", job.error)
    return job


def error_of(state: JobState, name: str, error: Mapping[str, Any] | None) -> JobEnded:
    """Why a job has no completion, as the error that a waiter gets."""
    if state is JobState.CANCELLED:
        return JobCancelled(f"{name} was cancelled")
    if state is JobState.EXPIRED:
        return JobExpired(f"{name} expired: its deadline passed before it was done")
    reason = error or {}
    words = [
        str(reason[key]) for key in ("field", "problem", "remedy", "message") if reason.get(key)
    ]
    return JobFailed(f"{name} failed: {': '.join(words) or 'no reason was recorded'}")


def end_of(after: JobId | PageEnd | None) -> UUID | PageEnd | None:
    """Returns where a page of a list begins. Raises Invalid."""
    return after if after is None or isinstance(after, PageEnd) else as_id(after, "after")


def settings_with(**given: str | None) -> Settings:
    """The environment's settings; what is given comes first."""
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return Settings(**values)
