"""What a completion's text must be: a schema, an expression, one of some texts, or a grammar.

Knows no tokenizer and no library of grammars.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shardline.base.errors import Invalid

FIELD = "structured_outputs"
MAX_GRAMMAR_BYTES = 64 << 10
"""As JSON. Each stage gets it with the sequence, and the last one compiles it."""

MAX_SCHEMA_DEPTH = 64

GUIDANCE = "x-guidance"
"""The keyword of a schema that sets the format of its JSON, and whether it is lenient."""

COMBINING = frozenset({"allOf", "dependentSchemas", "if", "not", "oneOf", "unevaluatedProperties"})
"""Keywords by which one value obeys several schemas, or must not obey one: a schema that has one of
them anywhere stays as it is."""
COMBINING_BESIDE_PROPERTIES = frozenset({"$ref", "anyOf"})
NEEDING_MORE = frozenset({"additionalProperties", "minProperties", "patternProperties"})
"""Next to one of these, an object may need properties that are not named."""

MAX_LEVELS = 64
"""Below, a schema stays as it is."""
BY_NAME = ("properties", "$defs", "definitions")
"""Keywords that hold schemas by name."""

Pattern = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_BYTES)]


class StructuredOutput(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Holds exactly one of its fields. Their names are vLLM's."""

    json: dict[str, Any] | Pattern | None = None
    """A JSON schema, as an object or as its text. It becomes its text: the order of properties is
    that of the answer, and Postgres keeps none of an object's."""
    json_object: bool = False
    """Any JSON object."""
    regex: Pattern | None = None
    """The whole text matches it, in the syntax of Rust's `regex`, without look-around."""
    choice: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    """The text is one of them."""
    grammar: Pattern | None = None
    """A context-free grammar: Lark, or GBNF as llama.cpp has it."""

    def __post_init__(self) -> None:
        if isinstance(self.json, dict):
            # What cannot be written is refused by `check_structured_output`, by name
            with suppress(RecursionError, UnicodeEncodeError):
                text = msgspec.json.encode(self.json).decode()
                msgspec.structs.force_setattr(self, "json", text)

    @property
    def kind(self) -> str:
        """The name of the field that is set; empty when there are none or several."""
        found = [name for name in self.__struct_fields__ if getattr(self, name)]
        return found[0] if len(found) == 1 else ""


def check_structured_output(output: StructuredOutput) -> None:
    """Checks sizes, and that one kind is named. Raises Invalid."""
    if not output.kind:
        names = ", ".join(output.__struct_fields__)
        raise Invalid(FIELD, f"it needs exactly one of {names}", "Send one of them")
    try:
        num_bytes = len(msgspec.json.encode(output))
    except RecursionError:
        num_bytes = MAX_GRAMMAR_BYTES + 1
    except UnicodeEncodeError as error:
        raise Invalid(FIELD, "it holds a lone surrogate", "Send whole characters") from error
    if num_bytes > MAX_GRAMMAR_BYTES:
        problem = f"it has more than {MAX_GRAMMAR_BYTES} bytes as JSON"
        raise Invalid(f"{FIELD}.{output.kind}", problem, "Send a smaller one")


def lenient(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema of which the keywords that no grammar holds are not refused: they do not
    count."""
    given = schema.get(GUIDANCE)
    return {**schema, GUIDANCE: {"lenient": True, **(given if isinstance(given, dict) else {})}}


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema whose objects with named properties, and no rule for others, have no others:
    allowed any, a small model writes them without end. It accepts nothing that the first one does
    not."""
    parts = list(islice(_parts(schema), MAX_GRAMMAR_BYTES + 1))
    # With more parts it is refused for its bytes.
    is_kept = len(parts) > MAX_GRAMMAR_BYTES or any(map(_combines, parts))
    return schema if is_kept else dict(_closed(schema))


def _combines(part: Any) -> bool:
    return isinstance(part, Mapping) and (
        not COMBINING.isdisjoint(part)
        or ("properties" in part and not COMBINING_BESIDE_PROPERTIES.isdisjoint(part))
    )


def _parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schema, and all values in it."""
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        yield part
        if isinstance(part, Mapping):
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def _closed(schema: Any, level: int = 0) -> Any:
    if not isinstance(schema, Mapping) or level == MAX_LEVELS:
        return schema
    new = dict(schema)
    for name in BY_NAME:
        if isinstance(children := new.get(name), Mapping):
            new[name] = {key: _closed(child, level + 1) for key, child in children.items()}
    for name in ("items", "additionalProperties"):
        if name in new:
            new[name] = _closed(new[name], level + 1)
    for name in ("anyOf", "prefixItems"):
        if isinstance(members := new.get(name), list):
            new[name] = [_closed(member, level + 1) for member in members]
    return {**new, "additionalProperties": False} if _names_all(new) else new


def _names_all(schema: Mapping[str, Any]) -> bool:
    """Whether its properties are all that an object of it needs."""
    properties = schema.get("properties")
    required = schema.get("required", [])
    return (
        isinstance(properties, Mapping)
        and NEEDING_MORE.isdisjoint(schema)
        and isinstance(required, list)
        and all(name in properties for name in required)
    )
