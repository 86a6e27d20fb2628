"""A filter of jobs, as doors receive it: which ones an act on many is for. Knows no database."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import Meta

from shardline.base.errors import Invalid
from shardline.contract.batches.batch import BATCH_ID, PREFIX
from shardline.contract.job import JobState
from shardline.contract.request_parsing import invalid_from

MAX_IDS = 1_000
REMEDY = "Name at least one field, for example the model or the state"

Name = Annotated[str, Meta(min_length=1, max_length=256)]
BatchId = Annotated[str, Meta(pattern=BATCH_ID)]
Moment = Annotated[datetime, Meta(tz=True)]


class JobKind(StrEnum):
    """What a job asks for."""

    TEXT = "text"
    CHAT = "chat"
    DECISION = "decision"


class JobFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Jobs for which every field that is given holds."""

    ids: Annotated[tuple[UUID, ...], Meta(max_length=MAX_IDS)] | None = None
    tenant: Name | None = None
    model: Name | None = None
    state: JobState | None = None
    kind: JobKind | None = None
    batch: BatchId | None = None
    created_after: Moment | None = None
    """Created then or later."""
    created_before: Moment | None = None
    error_code: Name | None = None
    metadata: Annotated[dict[str, Any], Meta(min_length=1)] | None = None
    """Each key with its value is in the job's."""

    @property
    def batch_id(self) -> UUID | None:
        """The batch of the jobs."""
        return None if self.batch is None else UUID(self.batch.removeprefix(PREFIX))


AnyFilter = JobFilter | Mapping[str, Any]


def parse_filter(given: AnyFilter) -> JobFilter:
    """Raises Invalid, also for a filter that names nothing: that would be every job."""
    try:
        found = given if isinstance(given, JobFilter) else msgspec.convert(given, JobFilter)
    except msgspec.ValidationError as error:
        raise invalid_from(error) from error
    if found == JobFilter():
        raise Invalid("filter", "it is empty, which would be every job", REMEDY)
    return found
