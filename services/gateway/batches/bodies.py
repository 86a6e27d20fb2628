"""The bodies of OpenAI's routes for batches. The API's description is made from these types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.batches.validation import BatchError
from services.gateway.files.bodies import ExpirySeconds, file_name
from services.gateway.responses.documents import InputDetails, OutputDetails, ResponseUsage
from shardline.contract.batches.batch import (
    OPEN,
    PREFIX,
    WINDOW,
    BatchStatus,
    Endpoint,
    window_seconds,
)
from shardline.contract.ids import parse_id
from shardline.store.batches import BatchRow

MAX_PAGE = 100


class ExpiresAfter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the output is deleted, counted from the end of its batch."""

    anchor: Literal["created_at"]
    seconds: ExpirySeconds


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/batches`. Of OpenAI's window of 24h any other may be taken, to 30d."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Annotated[str, Meta(pattern=WINDOW)]
    metadata: dict[str, Any] | None = None
    output_expires_after: ExpiresAfter | None = None

    @property
    def window_s(self) -> float:
        """The window in seconds. Raises Invalid."""
        return window_seconds(self.completion_window)


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """What is wrong with the file of a batch."""

    data: list[BatchError]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of a batch, as they were when a gateway looked last: at the end all of them."""

    total: int
    completed: int
    failed: int


class BatchDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="batch"):
    """A batch, as OpenAI's clients know it."""

    id: str
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: ResponseUsage
    metadata: dict[str, Any] | None

    @classmethod
    def of(cls, row: BatchRow) -> BatchDocument:
        """The row of a batch, as it is answered."""
        counts = row.counts
        # While it runs lines may come into the file.
        may_have_output = counts.completed > 0 or row.status in OPEN
        output_id = row.output_file_id if may_have_output else None
        moments = {
            name: None if at is None else int(at.timestamp()) for name, at in row.moments.items()
        }
        errors = [msgspec.convert(error, BatchError) for error in row.errors]
        return cls(
            **moments,
            id=batch_name(row),
            endpoint=row.endpoint,
            model=row.model,
            errors=BatchErrors(data=errors) if errors else None,
            input_file_id=file_name(row.input_file_id),
            completion_window=row.completion_window,
            status=row.status,
            output_file_id=None if output_id is None else file_name(output_id),
            error_file_id=None if row.error_file_id is None else file_name(row.error_file_id),
            created_at=int(row.created_at.timestamp()),
            expires_at=int(row.expires_at.timestamp()),
            request_counts=RequestCounts(
                total=row.num_lines, completed=counts.completed, failed=counts.failed
            ),
            usage=ResponseUsage(
                input_tokens=counts.prompt_tokens,
                input_tokens_details=InputDetails(cached_tokens=counts.cached_tokens),
                output_tokens=counts.completion_tokens,
                output_tokens_details=OutputDetails(reasoning_tokens=counts.reasoning_tokens),
                total_tokens=counts.prompt_tokens + counts.completion_tokens,
            ),
            metadata=dict(row.metadata) or None,
        )


class BatchList(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """One page, newest first; `last_id` is `after` of the next one."""

    data: list[BatchDocument]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of `GET /v1/batches`."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 20
    after: Annotated[str, Meta(description="`last_id` of the page before")] | None = None


def batch_name(row: BatchRow) -> str:
    """A batch, as clients name it."""
    return f"{PREFIX}{row.id}"


def batch_id_of(name: str, field: str = "batch_id") -> Any:
    """Reads a name as clients send it. Raises Invalid, naming `field`."""
    return parse_id(name.removeprefix(PREFIX), field)
