"""Turns what a caller passes into checked requests, and an ended job into its error. Knows no
database."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from shardline.base.errors import Invalid, JobCancelled, JobEnded, JobExpired, JobFailed
from shardline.contract import plain_json
from shardline.contract.job import DEFAULT_TENANT, Job, JobRequest, JobState
from shardline.contract.request_parsing import parse_request

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
    for place, one in enumerate(_outcomes(requests, tenant)):
        if isinstance(one, Invalid):
            raise Invalid(f"requests[{place}].{one.field}", one.problem, one.remedy) from one
        found.append(one)
    return found


def checked_each(requests: Iterable[AnyRequest], tenant: str) -> list[JobRequest | Invalid]:
    """Many requests as `checked` takes them; the error of a wrong one stands in its place. Raises
    Invalid for too many."""
    return list(_outcomes(requests, tenant))


def _outcomes(requests: Iterable[AnyRequest], tenant: str) -> Iterator[JobRequest | Invalid]:
    for place, request in enumerate(requests):
        if place == MAX_REQUESTS:
            raise Invalid(
                "requests", f"there are more than {MAX_REQUESTS}", "Send them in several calls"
            )
        try:
            yield _checked(request, tenant)
        except Invalid as error:
            yield error


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


def succeeded(job: Job, state: str | None = None) -> Job:
    """The job, if it succeeded. Raises JobFailed, JobCancelled or JobExpired with the reason.

    `state` is that of a stream's last delta, which may be ahead of the row.
    """
    ended = JobState(state or job.state)
    if ended is not JobState.SUCCEEDED:
        raise _error_of(ended, f"job {job.id}", job.error)
    return job


def _error_of(state: JobState, name: str, error: Mapping[str, Any] | None) -> JobEnded:
    if state is JobState.CANCELLED:
        return JobCancelled(f"{name} was cancelled")
    if state is JobState.EXPIRED:
        return JobExpired(f"{name} expired: its deadline passed before it was done")
    reason = error or {}
    words = [
        str(reason[key]) for key in ("field", "problem", "remedy", "message") if reason.get(key)
    ]
    return JobFailed(f"{name} failed: {': '.join(words) or 'no reason was recorded'}")
