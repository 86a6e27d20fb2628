"""The bodies of OpenAI's routes for files. The API's description is made from these types."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from msgspec import Meta

from shardline.contract.batches.batch import FILE_PREFIX
from shardline.contract.batches.batch_tables import MAX_FILENAME_CHARS
from shardline.contract.ids import parse_id
from shardline.store.files import FileRow

PREFIX = FILE_PREFIX
FILE_ID = rf"^({PREFIX})?[0-9a-f]{{8}}(-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}$"

MIN_EXPIRY_S = 3_600
MAX_EXPIRY_S = 2_592_000
"""Of `expires_after`, as OpenAI has them."""

MAX_PAGE = 10_000

ExpirySeconds = Annotated[int, Meta(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]


class UploadedFile(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="file"):
    """A file, as OpenAI's clients know it. `bytes` of a batch's output is known with its end."""

    id: str
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None

    @classmethod
    def of(cls, row: FileRow) -> UploadedFile:
        """The row of a file, as it is answered."""
        return cls(
            id=file_name(row.id),
            bytes=row.num_bytes,
            created_at=int(row.created_at.timestamp()),
            expires_at=None if row.expires_at is None else int(row.expires_at.timestamp()),
            filename=row.filename,
            purpose=row.purpose,
        )


class FileList(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """One page; `last_id` is `after` of the next one."""

    data: list[UploadedFile]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="file"):
    """A file that is gone."""

    id: str
    deleted: Literal[True]


class FileQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of `GET /v1/files`."""

    purpose: Annotated[str, Meta(max_length=64)] | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = MAX_PAGE
    order: Literal["asc", "desc"] = "desc"
    after: Annotated[str, Meta(description="`last_id` of the page before")] | None = None


class FileFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of an upload, without its file."""

    purpose: Literal["batch"]
    anchor: Literal["created_at"] | None = msgspec.field(default=None, name="expires_after[anchor]")
    seconds: ExpirySeconds | None = msgspec.field(default=None, name="expires_after[seconds]")


def upload_schema() -> dict[str, Any]:
    """Returns the JSON schema of an upload's form."""
    (_,), schemas = msgspec.json.schema_components((FileFields,), ref_template="{name}")
    found: dict[str, Any] = schemas["FileFields"]
    file = {"type": "string", "contentMediaType": "application/octet-stream"}
    fields = {name: _without_null(one) for name, one in found["properties"].items()}
    return {
        "type": "object",
        "properties": {**fields, "file": file},
        "required": ["file", "purpose"],
        "additionalProperties": False,
    }


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A field of a form is left out where it has no value."""
    found: dict[str, Any] = next(
        one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"
    )
    if "enum" in found:
        return {"enum": [one for one in found["enum"] if one is not None]}
    return found


def file_name(file_id: UUID) -> str:
    """A file, as clients name it."""
    return f"{PREFIX}{file_id}"


def file_id_of(name: str, field: str = "file_id") -> UUID:
    """Reads a name as clients send it. Raises Invalid, naming `field`."""
    return parse_id(name.removeprefix(PREFIX), field)


def stored_filename(name: str) -> str:
    """The end of a file's name, as far as a row holds it: what a form sends may be a path."""
    last = name.replace("\\", "/").rpartition("/")[2].replace("\0", "")
    return last[-MAX_FILENAME_CHARS:] or "file"
