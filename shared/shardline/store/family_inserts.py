"""Inserts rows together with their parents: a child of a refused parent is refused for the same
reason. Knows no trigger: the table checks parents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import UUID

from sqlalchemy import Connection

from shardline.base.errors import Invalid, LimitExceeded, ShardlineError
from shardline.contract.parents.parent_job import FIELD
from shardline.store.inserts import EncodedRequest, StoredRequest, insert_encoded

Outcome = StoredRequest | ShardlineError


def insert_families(connection: Connection, requests: Sequence[EncodedRequest]) -> list[Outcome]:
    """Inserts as `insert_encoded`; children of a request that a quota refuses have its error."""
    parents = _parents_among(requests)
    if not parents:
        return insert_encoded(connection, requests)
    try:
        with connection.begin_nested():
            return insert_encoded(connection, requests)
    except Invalid as error:
        if error.field != FIELD:
            raise
    return _by_generation(connection, requests, parents)


def insert_all_families(
    connection: Connection, requests: Sequence[EncodedRequest]
) -> list[StoredRequest]:
    """Inserts as `insert_families`. Raises what it gives for the first that is not stored."""
    stored: list[StoredRequest] = []
    for outcome in insert_families(connection, requests):
        if isinstance(outcome, ShardlineError):
            raise outcome
        stored.append(outcome)
    return stored


def refused_with_parents(
    requests: Sequence[EncodedRequest], outcomes: Sequence[Outcome]
) -> list[Outcome]:
    """Returns the outcomes of requests that were inserted apart, with the parents' refusals in
    place of a child's error that it has no parent."""
    parents = _parents_among(requests)
    found: list[Outcome] = []
    for place, outcome in enumerate(outcomes):
        is_orphan = isinstance(outcome, Invalid) and outcome.field == FIELD
        refusal = _refusal(parents.get(place, ()), found) if is_orphan else None
        found.append(outcome if refusal is None else refusal)
    return found


def _by_generation(
    connection: Connection,
    requests: Sequence[EncodedRequest],
    parents: Mapping[int, Sequence[int]],
) -> list[Outcome]:
    """Inserts children once it is known what became of their parents."""
    known: dict[int, Outcome] = {}
    while len(known) < len(requests):
        ready = list[int]()
        for place in range(len(requests)):
            mine = parents.get(place, ())
            if place in known or not all(parent in known for parent in mine):
                continue
            refusal = _refusal(mine, known)
            if refusal is None:
                ready.append(place)
            else:
                known[place] = refusal
        stored = insert_encoded(connection, [requests[place] for place in ready])
        known |= zip(ready, stored, strict=True)
    return [known[place] for place in range(len(requests))]


def _refusal(
    parents: Sequence[int], outcomes: Mapping[int, Outcome] | Sequence[Outcome]
) -> LimitExceeded | None:
    refusals = (outcomes[parent] for parent in parents)
    return next((one for one in refusals if isinstance(one, LimitExceeded)), None)


def _parents_among(requests: Sequence[EncodedRequest]) -> dict[int, list[int]]:
    """Maps places of children to the places of their parents, which come before them."""
    places: dict[UUID, int] = {}
    found: dict[int, list[int]] = {}
    for place, request in enumerate(requests):
        if mine := [places[parent] for parent in request.parents if parent in places]:
            found[place] = mine
        places[request.job_id] = place
    return found
