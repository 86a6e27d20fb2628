"""Stores what can be stored of many requests; the error of another one stands in its place. Knows
no client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from uuid import UUID

from sqlalchemy import Connection

from shardline.base.errors import Invalid, ShardlineError
from shardline.client.questions import Question, check_number
from shardline.client.requests import AnyRequest, checked_each
from shardline.contract.choices import choices_of
from shardline.contract.job import JobRequest
from shardline.store.family_inserts import insert_families, refused_with_parents
from shardline.store.inserts import EncodedRequest, StoredRequest, encode_choices

Outcomes = list[UUID | ShardlineError]


def skips(on_error: str) -> bool:
    """Whether requests that cannot be stored are left out. Raises Invalid."""
    if on_error not in ("raise", "skip"):
        raise Invalid("on_error", f"it is {on_error!r}", "Pass raise or skip")
    return on_error == "skip"


def insert_some(requests: Iterable[AnyRequest], tenant: str, n: int) -> Question[Outcomes]:
    """Store `n` choices of each request that can be stored: ids or errors in the same order, so
    many of each side by side."""
    parsed = checked_each(requests, tenant)
    check_number(len(parsed), n)
    encoded = [_encoded(request, n) for request in parsed]
    good = [one for one in encoded if isinstance(one, EncodedRequest)]

    def insert(connection: Connection) -> Outcomes:
        stored = iter(refused_with_parents(good, _stored(connection, good)))
        outcomes = (next(stored) if isinstance(one, EncodedRequest) else one for one in encoded)
        return [place for outcome in outcomes for place in _places(outcome, n)]

    return insert


def _encoded(request: JobRequest | Invalid, n: int) -> EncodedRequest | Invalid:
    if isinstance(request, Invalid):
        return request
    try:
        return encode_choices(choices_of(request, n))
    except Invalid as error:
        return error


def _stored(
    connection: Connection, requests: Sequence[EncodedRequest]
) -> list[StoredRequest | ShardlineError]:
    """Halves what has a row against a rule of the table, until that one is alone."""
    if not requests:
        return []
    try:
        with connection.begin_nested():
            return insert_families(connection, requests)
    except Invalid as error:
        if len(requests) == 1:
            return [error]
    half = len(requests) // 2
    return [*_stored(connection, requests[:half]), *_stored(connection, requests[half:])]


def _places(outcome: StoredRequest | ShardlineError, n: int) -> Iterator[UUID | ShardlineError]:
    if isinstance(outcome, ShardlineError):
        yield from [outcome] * n
    else:
        yield from (outcome.job_id, *outcome.others)
