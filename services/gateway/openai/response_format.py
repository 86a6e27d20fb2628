"""Translates OpenAI's `response_format` for a job. Knows no grammar: schemas are checked with the
prompt."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from shardline.contract.structured_output import StructuredOutput, closed, lenient


class TextFormat(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"
):
    """Any text."""

    def structured(self) -> StructuredOutput | None:
        """Returns what the text must be."""
        return None


class JsonObjectFormat(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"
):
    """Any JSON object, or as llama.cpp has it, JSON of a schema. Raises ValueError."""

    schema: dict[str, Any] | None = None
    value: dict[str, Any] | None = None
    """Another name of `schema`: Hugging Face's."""

    def __post_init__(self) -> None:
        """Give it its one form, with closed objects, once for all choices."""
        if self.value is not None and self.schema not in (None, self.value):
            raise ValueError("value differs from schema: send one of the two")
        if (schema := self.schema or self.value) is not None:
            force_setattr(self, "schema", closed(schema))

    @property
    def schema_field(self) -> str:
        """Returns the name that the schema came under."""
        return "schema" if self.value is None else "value"

    def structured(self) -> StructuredOutput | None:
        """Returns what the text must be."""
        return object_of(self.schema)


class NamedSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema. Unless it is `strict`, keywords that no grammar holds do not count."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        """Close its objects, once for all choices."""
        force_setattr(self, "schema", closed(self.schema))


class JsonSchemaFormat(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="json_schema",
):
    """JSON of a schema."""

    json_schema: NamedSchema

    def structured(self) -> StructuredOutput | None:
        """Returns what the text must be."""
        return schema_of(self.json_schema.schema, self.json_schema.strict)


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


def object_of(schema: dict[str, Any] | None) -> StructuredOutput:
    """Returns JSON of the schema; any object where the schema is empty."""
    return StructuredOutput(json=schema) if schema else StructuredOutput(json_object=True)


def schema_of(schema: dict[str, Any], strict: bool | None) -> StructuredOutput:
    """Returns JSON of the schema."""
    return StructuredOutput(json=schema if strict else lenient(schema))
