"""Which rows a head of this release understands: a later release's doors may have written some, or
somebody's hand.

One strange row must not hold up the others, nor end its head. Knows no statement: `claims` does
what is decided here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import msgspec
import structlog
from sqlalchemy import Row

from shardline.contract.job import SamplingParams
from shardline.contract.request_parsing import invalid_from, shown
from shardline.store.connection.encoding import load_params

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedRows:
    """Rows by what is to be done with them."""

    readable: list[UUID] = field(default_factory=list)
    later: list[UUID] = field(default_factory=list)
    """Of a later release: to run them without what they ask for would be wrong, to fail them
    too."""
    wrong: dict[UUID, dict[str, Any]] = field(default_factory=dict)
    """With values that no release takes, and the reason: changed after they were checked."""


def sort_rows(rows: Iterable[Row[Any]]) -> SortedRows:
    """Sorts rows by the `params` of each."""
    found = SortedRows()
    for row in rows:
        try:
            load_params(row.params)
        except msgspec.ValidationError as error:
            names = row.params.keys() if isinstance(row.params, Mapping) else set()
            unknown = sorted(shown(name) for name in names - set(SamplingParams.__struct_fields__))
            if unknown:
                found.later.append(row.id)
                log.warning(
                    "a job waits for a newer head: this one lacks parameters",
                    job_id=str(row.id),
                    lacks=unknown,
                )
            else:
                found.wrong[row.id] = invalid_from(error).as_dict()
                log.warning(
                    "a job fails: its row was changed after its check",
                    job_id=str(row.id),
                    error=str(error),
                )
        else:
            found.readable.append(row.id)
    return found
