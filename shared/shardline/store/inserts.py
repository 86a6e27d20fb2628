"""New rows in `jobs`: thousands in one statement, a repeat inserts nothing. Knows no tokenizer.

Locks: an insert waits for an open transaction with the same id or key, so rows are inserted in one
order; before that, rows of `quota_use` of tenants that have quotas, in order of id.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError, OperationalError

from shardline.base.errors import Invalid, LimitExceeded, ShardlineError
from shardline.contract import plain_json
from shardline.contract.ids import new_id
from shardline.contract.job import DEFAULT_TENANT, JobRequest
from shardline.contract.tables import MAX_PROMPT_BYTES
from shardline.store.choices import repeated_choices
from shardline.store.connection.database import failure_of, is_over_limit
from shardline.store.connection.encoding import dump, place_of_unstorable, storable, unstorable
from shardline.store.idempotency import repeated
from shardline.store.row_inserts import drop, insert_rows, invalid_row, release
from shardline.store.tenants.limits import limit_error_of

MAX_ROWS = 2_000
MAX_BYTES = 8 << 20
"""Of rows in one statement; one larger row travels alone."""

Tokenized = tuple[Sequence[int], int]
"""A request's prompt ids and max_tokens, of a door that validated and tokenized it already."""

INSERT_FAILED = text("""
-- Those that are new.
WITH failed AS (
    INSERT INTO jobs (id, tenant_id, model, prompt, metadata, error, state, finished_at)
    SELECT new.id, coalesce(tenants.id, :no_tenant), model, prompt, metadata, error, 'failed', now()
    FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS new(
        id uuid, tenant text, model text, prompt text, metadata jsonb, error jsonb)
    LEFT JOIN tenants ON tenants.id = new.tenant ORDER BY new.id
    ON CONFLICT DO NOTHING RETURNING id, tenant_id
)
-- A trigger notifies of other ends; it does not run at an insert.
SELECT id FROM failed
CROSS JOIN LATERAL shardline_tell_webhooks(tenant_id, 'job.failed', id)
""")

# What docs/doors.md tells producers that speak SQL: defaults, checks and a trigger of the table do
# all else.
INSERT_PLAINLY = text("""
INSERT INTO jobs (id, model, prompt, params) VALUES (:id, :model, :prompt, CAST(:params AS jsonb))
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """A request that can never run, kept as a `failed` row so that its producer learns why."""

    id: UUID
    model: str
    error: Mapping[str, Any]
    tenant: str = DEFAULT_TENANT
    """Without such a tenant the row is the default one's."""
    prompt: str | None = None
    metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRequest:
    """The row that holds a request. `is_new` is True for the one request that inserted it, False
    for a repeat."""

    job_id: UUID
    is_new: bool
    others: tuple[UUID, ...] = ()
    """The rows of its further choices, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRequest:
    """A request as the statements take it: checked, in JSON, with what orders it among others."""

    job_id: UUID
    order: tuple[str, str, str]
    fields: str
    """A JSON object."""
    others: tuple[EncodedRequest, ...] = ()
    """Its further choices, which are stored with it or not at all."""
    parents: tuple[UUID, ...] = ()
    """The jobs that it waits for."""
    key_name: str | None = None
    """Of the API key that it came with."""

    @property
    def num_bytes(self) -> int:
        """About the size of its rows."""
        return len(self.fields) + sum(len(other.fields) for other in self.others)


def encode_request(request: JobRequest, tokenized: Tokenized | None = None) -> EncodedRequest:
    """Needs no connection, and for a long prompt some milliseconds: callers with others to serve do
    it elsewhere. Raises Invalid when Postgres cannot hold the request."""
    return _encoded(_row(request, tokenized), request)


def encode_choices(
    choices: Sequence[JobRequest],
    prepared: Sequence[Tokenized | None] | None = None,
    *,
    stored: Mapping[str, Any] | None = None,
) -> EncodedRequest:
    """Encodes the choices of one request, as `encode_request` each: the first has its id and key,
    and what OpenAI's lists show of it (`stored`). Raises Invalid."""
    rows = [_row(request, tokenized) for request, tokenized in _pairs(choices, prepared)]
    if len(rows) > 1:
        for index, row in enumerate(rows):
            row |= {"choice_of": rows[0]["id"], "choice_index": index}
    rows[0]["stored"] = stored
    first, *others = map(_encoded, rows, choices)
    return replace(first, others=tuple(others))


def _encoded(row: Mapping[str, Any], request: JobRequest) -> EncodedRequest:
    parents = tuple(parent.job for parent in request.depends_on or ())
    return EncodedRequest(job_id=row["id"], order=_order(row), fields=dump(row), parents=parents)


def insert_jobs(
    connection: Connection,
    requests: Sequence[JobRequest],
    *,
    prepared: Sequence[Tokenized | None] | None = None,
) -> list[StoredRequest]:
    """The rows that hold these requests, in their order; they are accepted once the caller commits.

    A known id or idempotency key inserts nothing and returns the job that has it. Raises Conflict
    when that job asks for something else (see `repeats`), Invalid when Postgres cannot hold the
    request.
    """
    encoded = [
        encode_request(request, tokenized) for request, tokenized in _pairs(requests, prepared)
    ]
    return insert_all(connection, encoded)


def insert_all(connection: Connection, requests: Sequence[EncodedRequest]) -> list[StoredRequest]:
    """Inserts as `insert_jobs`, which raises what `insert_encoded` gives for one of them."""
    stored: list[StoredRequest] = []
    for outcome in insert_encoded(connection, requests):
        if isinstance(outcome, ShardlineError):
            raise outcome
        stored.append(outcome)
    return stored


def insert_encoded(
    connection: Connection, requests: Sequence[EncodedRequest]
) -> list[StoredRequest | ShardlineError]:
    """Inserts as `insert_jobs`, for requests that have nothing to do with each other: what one of
    them asks for that cannot be is its own outcome (Conflict, Busy, LimitExceeded), and the others
    are stored. Raises Invalid for a row against a rule of the table, which stores none."""
    pairs = list(zip(requests, _insert_firsts(connection, requests), strict=True))
    pairs = _insert_others(connection, pairs)
    again = [
        (outcome.job_id, [other.fields for other in request.others])
        for request, outcome in pairs
        if isinstance(outcome, StoredRequest) and not outcome.is_new
    ]
    there = iter(repeated_choices(connection, again) if again else ())
    return [_with_choices(request, outcome, there) for request, outcome in pairs]


def _insert_firsts(
    connection: Connection, requests: Sequence[EncodedRequest]
) -> list[StoredRequest | ShardlineError]:
    """Inserts them without their further choices."""
    stored: dict[int, StoredRequest | ShardlineError] = {}
    for numbers, encoded in _chunks(requests):
        stored |= _insert(
            connection, {number: requests[number].job_id for number in numbers}, encoded
        )
    return [stored[number] for number in range(len(requests))]


def _insert_others(
    connection: Connection, pairs: list[tuple[EncodedRequest, StoredRequest | ShardlineError]]
) -> list[tuple[EncodedRequest, StoredRequest | ShardlineError]]:
    """Inserts the further choices of new requests; one that a quota has no room for goes as a
    whole."""
    others = [
        (request.job_id, replace(other, key_name=request.key_name))
        for request, outcome in pairs
        if _is_new(outcome)
        for other in request.others
    ]
    outcomes = _insert_firsts(connection, [other for _, other in others])
    refused: dict[UUID, ShardlineError] = {}
    for (first_id, _), outcome in zip(others, outcomes, strict=True):
        if isinstance(outcome, LimitExceeded):
            refused[first_id] = outcome
        elif isinstance(outcome, ShardlineError):
            # Their ids were drawn for them.
            raise outcome
    for first_id in refused:
        drop(connection, first_id)
    return [
        (request, refused.get(request.job_id, outcome) if _is_new(outcome) else outcome)
        for request, outcome in pairs
    ]


def _is_new(outcome: StoredRequest | ShardlineError) -> bool:
    return isinstance(outcome, StoredRequest) and outcome.is_new


def _with_choices(
    request: EncodedRequest,
    outcome: StoredRequest | ShardlineError,
    there: Iterator[tuple[UUID, ...] | ShardlineError],
) -> StoredRequest | ShardlineError:
    """Adds the ids of further choices: the request's own, or those that were there before."""
    if isinstance(outcome, ShardlineError):
        return outcome
    if outcome.is_new:
        return replace(outcome, others=tuple(other.job_id for other in request.others))
    others = next(there)
    return others if isinstance(others, ShardlineError) else replace(outcome, others=others)


def insert_plainly(connection: Connection, requests: Sequence[JobRequest]) -> None:
    """Inserts as a producer that speaks SQL does: id, model, text and parameters, nothing checked
    here, a known id refused."""
    rows = [
        {
            "id": one.id,
            "model": one.model,
            "prompt": one.prompt,
            "params": dump(plain_json.builtins(one.params())),
        }
        for one in requests
    ]
    connection.execute(INSERT_PLAINLY, rows)


def insert_failed(connection: Connection, requests: Sequence[FailedRequest]) -> set[UUID]:
    """Requests with their reason, as rows that ended before they began. Returns those that were
    new."""
    rows = [
        {
            "id": request.id,
            "tenant": storable(request.tenant),
            "model": storable(request.model),
            "prompt": None
            if request.prompt is None
            else storable(request.prompt)[: MAX_PROMPT_BYTES // 4],
            "metadata": {}
            if request.metadata is None or unstorable(request.metadata)
            else request.metadata,
            "error": {name: storable(str(value)) for name, value in request.error.items()},
        }
        for request in sorted(requests, key=lambda request: request.id)
    ]
    values = {"rows": dump(rows), "no_tenant": DEFAULT_TENANT}
    return set(connection.scalars(INSERT_FAILED, values)) if rows else set()


def _insert(
    connection: Connection, ids: Mapping[int, UUID], encoded: str
) -> dict[int, StoredRequest | ShardlineError]:
    """One statement, and one more to find what was there before, if anything was."""
    try:
        rows = insert_rows(connection, encoded)
    except IntegrityError as error:
        raise invalid_row(error) from error
    except OperationalError as error:
        if (over := limit_error_of(error.orig)) is not None:
            raise over from error
        if is_over_limit(error.orig):
            problem = f"it is over a limit of Postgres: {failure_of(error).problem}"
            raise Invalid("request", problem, "Send a smaller one") from error
        raise
    stored: dict[int, StoredRequest | ShardlineError] = {}
    for number, job_id in ids.items():
        # Of several rows with one id the first was inserted.
        if job_id in rows.inserted:
            rows.inserted.remove(job_id)
            stored[number] = StoredRequest(job_id=job_id, is_new=True)
    others = [number for number in ids if number not in stored and number not in rows.refused]
    if others:
        if rows.reserved.intersection(others):
            release(connection, [ids[number] for number in others])
        for number, found in repeated(connection, encoded, others).items():
            stored[number] = (
                found
                if isinstance(found, ShardlineError)
                else StoredRequest(job_id=found, is_new=False)
            )
    return stored | rows.refused


def _pairs(
    requests: Sequence[JobRequest], prepared: Sequence[Tokenized | None] | None
) -> Iterable[tuple[JobRequest, Tokenized | None]]:
    return zip(requests, prepared if prepared is not None else [None] * len(requests), strict=True)


def _row(request: JobRequest, tokenized: Tokenized | None) -> dict[str, Any]:
    text_prompt = request.prompt if isinstance(request.prompt, str) else None
    given_ids = None if isinstance(request.prompt, str) else request.prompt
    # What waits for others is tokenized with their texts.
    known = None if request.depends_on else tokenized
    prompt_ids, max_tokens = known or (given_ids, None)
    row = {
        "id": request.id or new_id(),
        "tenant_id": request.tenant,
        "model": request.model,
        "prompt": text_prompt,
        "messages": plain_json.builtins(request.messages),
        "prompt_ids": prompt_ids,
        "params": plain_json.builtins(request.params()),
        "seed": request.seed,
        "priority": request.priority,
        "idempotency_key": request.idempotency_key,
        "metadata": request.metadata,
        "traceparent": request.traceparent,
        "delay_s": request.delay_s,
        "deadline_s": request.deadline_s,
        "flexible": request.flexible,
        "max_tokens": max_tokens,
        "max_crashes": request.max_crashes,
        "retry": plain_json.builtins(request.retry),
        "depends_on": plain_json.builtins(request.depends_on or None),
        "on_parent_failure": request.on_parent_failure,
    }
    _check_storable(row)
    # Postgres sorts the keys of an object; the model reads properties in their own order
    for tool in row["params"].get("tools", ()):
        function = tool["function"]
        if isinstance(function.get("parameters"), dict):
            function["parameters"] = dump(function["parameters"])
    return row


def _check_storable(row: Mapping[str, Any]) -> None:
    for name, value in row.items():
        if not isinstance(value, int | float | None) and name not in ("id", "prompt_ids"):
            problem = unstorable(value)
            if problem is not None:
                place = place_of_unstorable(value)
                field = (
                    place.removeprefix(".")
                    if name == "params"
                    else name.removesuffix("_id") + place
                )
                raise Invalid(field, problem, "Change it: Postgres cannot store it")


def _chunks(rows: Sequence[EncodedRequest]) -> Iterator[tuple[list[int], str]]:
    """The numbers of the rows of one statement, from 0, and these rows as JSON, each with its
    number.

    In one order for everybody: a row that meets its like of an open transaction waits for its end,
    and two transactions that insert the same rows in different orders would wait for each other.
    """
    numbers: list[int] = []
    encoded: list[str] = []
    num_bytes = 0
    depths = _depths(rows)
    for number in sorted(range(len(rows)), key=lambda one: (depths[one], rows[one].order)):
        key = rows[number].key_name
        named = f'"key_name":{dump(key)},' if key is not None else ""
        one = f'{{"number":{number},{named}{rows[number].fields[1:]}'
        if numbers and (len(numbers) == MAX_ROWS or num_bytes + len(one) > MAX_BYTES):
            yield numbers, f"[{','.join(encoded)}]"
            numbers = []
            encoded = []
            num_bytes = 0
        numbers.append(number)
        encoded.append(one)
        num_bytes += len(one)
    if numbers:
        yield numbers, f"[{','.join(encoded)}]"


def _depths(rows: Sequence[EncodedRequest]) -> list[int]:
    """How many rows before each one must be inserted after each other: its parents, and theirs."""
    depths: dict[UUID, int] = {}
    for row in rows:
        depths[row.job_id] = 1 + max((depths.get(one, -1) for one in row.parents), default=-1)
    return [depths[row.job_id] for row in rows]


def _order(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Orders by key where there is one: a repeat brings the same key, and perhaps a new id."""
    key = row["idempotency_key"]
    return row["tenant_id"], key or "", "" if key else str(row["id"])
