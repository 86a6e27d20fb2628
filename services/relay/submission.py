"""Stores requests from Celery and Redis as rows: valid ones queued, invalid ones `failed` with the
reason.

Owns what happens to a request that no row can hold; knows no transport.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal
from uuid import UUID

import msgspec
import structlog
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DataError, IntegrityError

from shardline.base.errors import Conflict, Invalid
from shardline.contract.ids import check_given_id, parse_id
from shardline.contract.job import DEFAULT_TENANT, JobRequest, JobState
from shardline.contract.request_parsing import check_metadata, parse_request
from shardline.store.connection.encoding import storable
from shardline.store.jobs import (
    FailedRequest,
    StoredRequest,
    get_job,
    insert_failed,
    insert_jobs,
    request_cancel,
)
from shardline.store.statistics.reports import states, tenants
from shardline.store.tenants import tenant_doors
from shardline_server.store import celery_tasks
from shardline_server.store.celery_tasks import CeleryTask

log = structlog.get_logger(__name__)

CONFLICT = "conflict"
"""Code of a reason: the id belongs to a job that this request must not touch."""

SubmissionStatus = Literal["accepted", "failed", "rejected"]
DOCUMENT_ERRORS = (DataError, IntegrityError, TypeError, ValueError, RecursionError, OverflowError)
"""Errors that a document can cause beyond those that validation raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request as it arrived. `id` is its job's unless it names one; the same submission always
    has the same."""

    id: UUID
    document: object
    task: CeleryTask | None = None
    """Of the Celery door: stored with the row, in one transaction."""
    refused: Invalid | None = None
    """Why it is no request, where its door knows."""
    tenant: str | None = None
    """The tenant of its door; None: the request names its tenant."""
    former_id: UUID | None = None
    """What a relay of the release before took for `id`, if another: its row may be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionResult:
    """What became of a submission; `reason` tells why it is not `accepted`. A `rejected` one has no
    row."""

    status: SubmissionStatus
    reason: dict[str, str] | None = None
    request: JobRequest | None = None
    """What was accepted."""

    @property
    def metric_label(self) -> str:
        """`outcome` of shardline_intake_entries, where a reject is called `dead`."""
        return "dead" if self.status == "rejected" else self.status


def store_submissions(
    database: Engine, submissions: Sequence[Submission]
) -> list[SubmissionResult]:
    """Store requests of one door; one result each, in order, already committed. Raises only when
    Postgres is unreachable, or a lock of a tenant's own keeps its door waiting."""
    submissions = _with_known_ids(database, submissions)
    parsed = [_parse(submission) for submission in submissions]
    pairs = list(zip(submissions, parsed, strict=True))
    try:
        with _transaction(database, submissions[0].tenant) as connection:
            _insert(connection, [pair for pair in pairs if isinstance(pair[1], JobRequest)])
    except (Invalid, Conflict, *DOCUMENT_ERRORS):
        # One request in the batch is invalid: store them one by one, so that the others are
        # accepted.
        return [_store_alone(database, *pair) for pair in pairs]
    return [
        SubmissionResult(status="accepted", request=one)
        if isinstance(one, JobRequest)
        else _refuse(database, submission, one)
        for submission, one in pairs
    ]


def _with_known_ids(database: Engine, submissions: Sequence[Submission]) -> list[Submission]:
    """Returns them with the ids under which the previous release has stored them. The row must have
    the same tenant, because other tenants may know those ids."""
    former = [one.former_id for one in submissions if one.former_id is not None]
    if not former:
        return list(submissions)
    with database.connect() as connection:
        owners = tenants(connection, former)
    return [
        replace(one, id=one.former_id)
        if one.former_id is not None and owners.get(one.former_id) == _tenant_of(one)
        else one
        for one in submissions
    ]


def _tenant_of(submission: Submission) -> str:
    document = submission.document
    named = document.get("tenant") if isinstance(document, dict) else None
    return submission.tenant or (named if isinstance(named, str) else DEFAULT_TENANT)


@contextmanager
def _transaction(database: Engine, tenant: str | None) -> Iterator[Connection]:
    with database.begin() as connection:
        if tenant is not None:
            tenant_doors.wait_briefly(connection)
        yield connection


def _insert(connection: Connection, pairs: Sequence[tuple[Submission, Any]]) -> None:
    stored = insert_jobs(connection, [request for _, request in pairs])
    for (submission, _), row in zip(pairs, stored, strict=True):
        _store_task(connection, submission.task, row)


def _store_task(connection: Connection, task: CeleryTask | None, row: StoredRequest) -> None:
    """A revoke that overtook its task takes effect with it."""
    if task is None:
        return
    # When a job must have begun is set by its first request.
    task = task if row.is_new else replace(task, expires_s=None)
    if celery_tasks.store(connection, task, job_id=row.job_id) is not None:
        request_cancel(connection, [row.job_id], running=False)


def _parse(submission: Submission) -> JobRequest | Invalid:
    if submission.refused is not None:
        return submission.refused
    try:
        request = parse_request(_owned(submission))
    except Invalid as error:
        return error
    except DOCUMENT_ERRORS as error:
        return Invalid(
            "request", f"it cannot be read: {error}", "See docs/jobs.md for fields and limits"
        )
    return request if request.id is not None else msgspec.structs.replace(request, id=submission.id)


def _owned(submission: Submission) -> object:
    """Returns the document with its door's tenant. Raises Invalid if it names another."""
    tenant = submission.tenant
    document = submission.document
    if tenant is None or not isinstance(document, dict):
        return document
    if document.get("tenant", tenant) != tenant:
        raise Invalid("tenant", "this door is another tenant's", "Leave it out")
    return {**document, "tenant": tenant}


def _store_alone(
    database: Engine, submission: Submission, parsed: JobRequest | Invalid
) -> SubmissionResult:
    if isinstance(parsed, Invalid):
        return _refuse(database, submission, parsed)
    try:
        with _transaction(database, submission.tenant) as connection:
            _insert(connection, [(submission, parsed)])
    except Conflict as error:
        return _reject(database, submission, _conflict(str(error)))
    except Invalid as error:
        return _refuse(database, submission, error)
    except DOCUMENT_ERRORS as error:
        problem = str(getattr(error, "orig", error)).partition("\n")[0]
        return _refuse(
            database,
            submission,
            Invalid("request", problem, "See docs/jobs.md for fields and limits"),
        )
    return SubmissionResult(status="accepted", request=parsed)


def _refuse(database: Engine, submission: Submission, error: Invalid) -> SubmissionResult:
    """A `failed` row if the request has an id and a model, else a reject."""
    reason = error.as_dict()
    failed = _failed_row(submission, reason)
    if failed is None:
        return _reject(database, submission, reason)
    with _transaction(database, submission.tenant) as connection:
        is_new = bool(insert_failed(connection, [failed]))
        is_kept = is_new or _is_repeat(connection, failed, submission.tenant)
        if is_kept:
            _store_task(connection, submission.task, StoredRequest(job_id=failed.id, is_new=is_new))
    if not is_kept:
        return _reject(database, submission, _conflict(f"job {failed.id} already exists; {error}"))
    log.info("job refused", job_id=str(failed.id), field=error.field, problem=error.problem)
    return SubmissionResult(status="failed", reason=reason)


def _is_repeat(connection: Connection, failed: FailedRequest, tenant: str | None) -> bool:
    """Whether the row is there because this request came before."""
    job = get_job(connection, failed.id)
    return job is not None and job.error == failed.error and tenant in (None, job.tenant)


def _conflict(problem: str) -> dict[str, str]:
    return {"code": CONFLICT, "problem": problem}


def _reject(database: Engine, submission: Submission, reason: dict[str, str]) -> SubmissionResult:
    """No row; the sender of a Celery task hears of it."""
    if submission.task is not None:
        with _transaction(database, submission.tenant) as connection:
            if (
                reason["code"] != CONFLICT
                or submission.tenant is not None
                or not _is_told_by_its_job(connection, submission.id)
            ):
                error = {name: storable(value) for name, value in reason.items()}
                celery_tasks.store(connection, submission.task, job_id=None, error=error)
    return SubmissionResult(status="rejected", reason=reason)


def _is_told_by_its_job(connection: Connection, job_id: UUID) -> bool:
    """Whether a result will come under this id: the job's that has it, lives, and came by another
    door."""
    state = states(connection, [job_id]).get(job_id)
    return (
        state is not None
        and not JobState(state).terminal
        and not celery_tasks.with_tasks(connection, [job_id])
    )


def _failed_row(submission: Submission, reason: dict[str, str]) -> FailedRequest | None:
    document = submission.document
    if not isinstance(document, dict):
        return None
    model = document.get("model")
    prompt = document.get("prompt")
    job_id = _told_id(document, submission.id)
    if job_id is None or not isinstance(model, str) or not 1 <= len(model) <= 256:
        return None
    return FailedRequest(
        id=job_id,
        model=model,
        error=reason,
        tenant=_tenant_of(submission),
        prompt=prompt if isinstance(prompt, str) else None,
        metadata=_kept_metadata(document.get("metadata")),
    )


def _kept_metadata(metadata: object) -> dict[str, Any] | None:
    """Returns the metadata that a row may hold, which is read with every look at it."""
    if not isinstance(metadata, dict):
        return None
    try:
        check_metadata(metadata)
    except Invalid:
        return None
    return metadata


def _told_id(document: dict[str, Any], default: UUID) -> UUID | None:
    """None when the request names an id that it may not have."""
    named = document.get("id")
    if named is None:
        return default
    try:
        given = parse_id(str(named))
        check_given_id(given)
    except Invalid:
        return None
    return given
