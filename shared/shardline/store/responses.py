"""Rows of `responses`: inserted with their jobs, read with them, deleted alone. Knows no form of an
answer.

Locks: rows of `responses`, then those of `jobs` that a deletion cancels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, RowMapping, Select, case, func, null, text

from shardline.base.errors import Invalid, ShardlineError
from shardline.contract.job import PROMPT_END_TOKENS, Job
from shardline.contract.response_table import responses
from shardline.contract.tables import jobs, results
from shardline.store.connection.encoding import (
    dump,
    is_any,
    load_job,
    place_of_unstorable,
    unstorable,
)
from shardline.store.inserts import EncodedRequest, StoredRequest, insert_encoded
from shardline.store.jobs import job_rows, request_cancel

INSERT = text("""
INSERT INTO responses (job_id, previous_response_id, instructions, input, options)
SELECT job_id, previous_response_id, instructions, input, options
FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS new(
    job_id uuid, previous_response_id uuid, instructions text, input jsonb, options jsonb)
""")

DELETE = text("""
DELETE FROM responses USING jobs
WHERE jobs.id = responses.job_id AND responses.job_id = :job_id AND jobs.tenant_id = :tenant
    AND responses.options @> '{"store": true}'
RETURNING responses.job_id
""")

SIZES = text("""
SELECT
    coalesce(sum(results.completion_tokens)
        FILTER (WHERE jobs.id = ANY(CAST(:outputs AS uuid[]))), 0),
    coalesce(sum(octet_length(CAST(jobs.params AS text))
        + octet_length(CAST(responses.options AS text))
        + CASE WHEN jobs.id = ANY(CAST(:inputs AS uuid[]))
            THEN octet_length(CAST(responses.input AS text)) ELSE 0 END), 0)
FROM responses
JOIN jobs ON jobs.id = responses.job_id
LEFT JOIN results ON results.job_id = jobs.id
WHERE jobs.id = ANY(CAST(:ids AS uuid[])) AND jobs.tenant_id = :tenant
    AND responses.options @> '{"store": true}'
""")

MAX_REFERENCED_TOKENS = 1 << 19
"""Of all outputs that one request refers to: each is decoded as a whole."""

MAX_REFERENCED_BYTES = 32 << 20
"""Of what else is read for them: parameters, and inputs that it refers to."""

UNREAD = frozenset(("prompt", "messages", "result_logprobs", "result_prompt_logprobs"))
"""Columns that may be long and have no part in an item."""

COLUMNS = [column.label(f"response_{column.name}") for column in responses.columns]
ROWS = job_rows().add_columns(*COLUMNS).join(responses, responses.c.job_id == jobs.c.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewResponse:
    """The columns of a response. `input` and `options` are JSON-like."""

    previous_id: UUID | None
    instructions: str | None
    input: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRow(NewResponse):
    """A response with its job. `messages` are the whole conversation before the output, its
    instructions first where it has some."""

    job: Job
    messages: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencedJobs:
    """Jobs of responses with items that another request refers to."""

    outputs: frozenset[UUID]
    inputs: frozenset[UUID]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedResponse(EncodedRequest):
    """A request with its response, as the statements take both."""

    response: str
    """A JSON object."""


def encode_response(request: EncodedRequest, response: NewResponse) -> EncodedResponse:
    """Needs no connection. Raises Invalid when Postgres cannot hold the response."""
    row = {
        "previous_response_id": response.previous_id,
        "instructions": response.instructions,
        "input": response.input,
        "options": response.options,
    }
    for name in ("instructions", "input", "options"):
        if (problem := unstorable(row[name])) is not None:
            place = place_of_unstorable(row[name])
            field = place.removeprefix(".") if name == "options" else name + place
            raise Invalid(field, problem, "Change it: Postgres cannot store it")
    return EncodedResponse(
        job_id=request.job_id,
        order=request.order,
        fields=request.fields,
        response=dump({"job_id": request.job_id, **row}),
    )


def insert_with_responses(
    connection: Connection, requests: Sequence[EncodedRequest]
) -> list[StoredRequest | ShardlineError]:
    """Inserts as `insert_encoded`, and with each new job the response that its request brings."""
    outcomes = insert_encoded(connection, requests)
    new = [
        request.response
        for request, outcome in zip(requests, outcomes, strict=True)
        if isinstance(request, EncodedResponse)
        and isinstance(outcome, StoredRequest)
        and outcome.is_new
    ]
    if new:
        connection.execute(INSERT, {"rows": f"[{','.join(new)}]"})
    return outcomes


def read_responses(connection: Connection, ids: Sequence[UUID]) -> list[ResponseRow | None]:
    """The responses of these jobs, in their order; None where a job has none."""
    query = ROWS.where(is_any(jobs.c.id, list(set(ids))))
    found = {row["id"]: _load(row) for row in connection.execute(query).mappings()}
    return [found.get(job_id) for job_id in ids]


def read_referenced(
    connection: Connection, wanted: ReferencedJobs, *, tenant: str
) -> dict[UUID, ResponseRow]:
    """The stored responses of the tenant among those wanted, by one query however many, once it is
    known how long they are together: without conversations and log-probabilities, of a prompt its
    end, and results and inputs where they are wanted. Raises Invalid where they are too long."""
    ids = {"outputs": list(wanted.outputs), "inputs": list(wanted.inputs)}
    every = list(wanted.outputs | wanted.inputs)
    (sizes,) = connection.execute(SIZES, {**ids, "ids": every, "tenant": tenant})
    _check_sizes(*sizes)
    query = _slim_rows(wanted).where(
        is_any(jobs.c.id, every),
        jobs.c.tenant_id == tenant,
        responses.c.options.contains({"store": True}),
    )
    return {row["id"]: _load(row) for row in connection.execute(query).mappings()}


def _check_sizes(num_tokens: int, num_bytes: int) -> None:
    for number, most, what in (
        (num_tokens, MAX_REFERENCED_TOKENS, "tokens in their outputs"),
        (num_bytes, MAX_REFERENCED_BYTES, "bytes"),
    ):
        if number > most:
            problem = f"the responses that it refers to have {number} {what}, over {most}"
            raise Invalid("input", problem, "Send the items of some of them")


def _slim_rows(wanted: ReferencedJobs) -> Select[Any]:
    is_output = is_any(jobs.c.id, wanted.outputs)
    prompt_ids = jobs.c.prompt_ids
    num_prompt = func.cardinality(prompt_ids)
    read: dict[str, ColumnElement[Any]] = {
        "prompt_ids": prompt_ids[num_prompt - PROMPT_END_TOKENS + 1 : num_prompt],
        "result_job_id": case((is_output, results.c.job_id)),
        "result_token_ids": case((is_output, results.c.token_ids)),
        "response_input": case((is_any(jobs.c.id, wanted.inputs), responses.c.input)),
        **{name: null() for name in UNREAD},
    }
    return ROWS.with_only_columns(
        *(
            read[column.key].label(column.key) if column.key in read else column
            for column in ROWS.selected_columns
        ),
        maintain_column_froms=True,
    )


def delete_response(connection: Connection, job_id: UUID, *, tenant: str) -> bool:
    """Deletes a response of the tenant, and cancels its job if that has not ended. Returns whether
    there was one."""
    if connection.scalar(DELETE, {"job_id": job_id, "tenant": tenant}) is None:
        return False
    request_cancel(connection, [job_id], tenant=tenant)
    return True


def _load(row: RowMapping) -> ResponseRow:
    return ResponseRow(
        job=load_job(row),
        messages=row["messages"] or (),
        previous_id=row["response_previous_response_id"],
        instructions=row["response_instructions"],
        input=row["response_input"],
        options=row["response_options"],
    )
