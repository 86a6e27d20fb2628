"""JSON schemas as pydantic, zod and OpenAPI write them, in the keywords that llguidance holds.

A rewritten schema accepts what the first one accepts. `format`s that JSON Schema does not define
are notes, but for those in FORMATS. Where `x-guidance` sets `lenient`, which llguidance reads too,
what no grammar holds does not count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from shardline.contract.structured_output import GUIDANCE, MAX_GRAMMAR_BYTES

SCHEMAS = ("additionalItems", "additionalProperties", "items")
"""Keywords with a schema."""
LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
"""Keywords with a list of them."""
BY_NAME = ("$defs", "definitions", "patternProperties", "properties")
REWRITTEN = re.compile(r'"(format|pattern|propertyNames|uniqueItems)"')
"""A schema without one of these stays as it is."""

NOTES = frozenset({"default", "description", "examples", "title", "type"})
"""Keywords of a property's name that rule out none."""

HEX = "[0-9a-fA-F]"
UUID = f"^{HEX}{{8}}-{HEX}{{4}}-%s{HEX}{{3}}-%s{HEX}{{3}}-{HEX}{{12}}$"
VARIANT = "[89abAB]"
"""Of a UUID that has a version."""
BASE64 = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
FORMATS: Mapping[str, str] = {
    **{f"uuid{version}": UUID % (version, VARIANT) for version in range(1, 9)},
    "base64": BASE64,
    "byte": BASE64,
    "base64url": "^([A-Za-z0-9_-]{4})*([A-Za-z0-9_-]{2}==|[A-Za-z0-9_-]{3}=)?$",
}
"""Without these the readers of pydantic, zod and OpenAPI refuse a text."""
DEFINED = {
    *("date", "time", "date-time", "duration", "uuid", "regex"),
    *("email", "hostname", "ipv4", "ipv6", "uri", "uri-reference", "uri-template"),
    *("idn-email", "idn-hostname", "iri", "iri-reference"),
    *("json-pointer", "relative-json-pointer", "unknown"),
}
"""By JSON Schema, and the one that llguidance takes for none."""
HELD = (DEFINED - {"regex", "unknown"}) | FORMATS.keys()
"""Those that a text is held to without a pattern, or that are refused by name."""

LOOK_AROUND = re.compile(r"(?<!\\)\(\?<?[=!]")
LOCAL = r"[A-Za-z0-9_'+\-]"
DOMAIN = r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
PATTERNS: Mapping[str, str] = {
    rf"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]{DOMAIN}": (
        rf"^({LOCAL}+\.)*{LOCAL}*[A-Za-z0-9_+-]{DOMAIN}"
    )
}
"""What zod writes for an email address, without look-ahead."""


def readable(schema: dict[str, Any] | str) -> dict[str, Any] | str:
    """Returns a schema, or its text, as llguidance reads it. What is no schema stays as it is."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    if not REWRITTEN.search(text):
        return schema
    try:
        root = json.loads(text)
        if not isinstance(root, dict):
            return schema
        guidance = root.get(GUIDANCE)
        is_lenient = isinstance(guidance, dict) and guidance.get("lenient") is True
        return dict(_Rewriter(root, is_lenient).rewritten(root))
    except (ValueError, RecursionError):
        return schema


class _Rewriter:
    def __init__(self, root: Mapping[str, Any], is_lenient: bool) -> None:
        self._root = root
        self._is_lenient = is_lenient

    def rewritten(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        new = dict(schema)
        for name in SCHEMAS:
            if isinstance(new.get(name), dict):
                new[name] = self.rewritten(new[name])
        for name in LISTS:
            if isinstance(new.get(name), list):
                new[name] = [self.rewritten(member) for member in new[name]]
        for name in BY_NAME:
            if isinstance(new.get(name), dict):
                new[name] = {key: self.rewritten(member) for key, member in new[name].items()}
        self._rewrite_text(new)
        self._rewrite_names(new)
        if new.get("uniqueItems") is False or new.get("maxItems") in (0, 1):
            new.pop("uniqueItems", None)
        return new

    def _rewrite_text(self, schema: dict[str, Any]) -> None:
        pattern, form = schema.get("pattern"), schema.get("format")
        if isinstance(pattern, str):
            schema["pattern"] = PATTERNS.get(pattern, pattern)
            # Next to a format that is held, zod writes the same again as a pattern.
            may_drop = self._is_lenient or (isinstance(form, str) and form in HELD)
            if may_drop and LOOK_AROUND.search(schema["pattern"]):
                del schema["pattern"]
        if isinstance(form, str) and form not in DEFINED:
            del schema["format"]
            if form in FORMATS:
                schema.setdefault("pattern", FORMATS[form])

    def _rewrite_names(self, schema: dict[str, Any]) -> None:
        """Writes `propertyNames` as properties, or their pattern, where it is the only keyword that
        names any."""
        names = self._resolved(schema.get("propertyNames"))
        if names is True:
            names = {}
        if not isinstance(names, dict) or names.get("type", "string") != "string":
            return
        rules = names.keys() - NOTES
        if not rules:
            del schema["propertyNames"]
            return
        if schema.keys() & {"properties", "patternProperties"}:
            return
        value = schema.get("additionalProperties", {})
        if (texts := _texts(names, rules)) is not None:
            if len(texts) * len(json.dumps(value)) > MAX_GRAMMAR_BYTES:
                return
            schema["properties"] = dict.fromkeys(texts, value)
        elif (pattern := _pattern(names, rules)) is not None:
            schema["patternProperties"] = {pattern: value}
        else:
            return
        schema["additionalProperties"] = False
        del schema["propertyNames"]

    def _resolved(self, schema: Any) -> Any:
        """Returns the schema that a reference into the definitions names, else the same one."""
        place = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(place, str):
            return schema
        found: Any = self._root
        for name in place.removeprefix("#/").split("/"):
            found = found.get(name) if isinstance(found, dict) else None
        return found


def _texts(names: Mapping[str, Any], rules: set[str]) -> list[str] | None:
    """Returns the names, where the only rule lists them."""
    texts = [names["const"]] if rules == {"const"} else names["enum"] if rules == {"enum"} else None
    is_list = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    return texts if is_list else None


def _pattern(names: Mapping[str, Any], rules: set[str]) -> str | None:
    """Returns the one pattern that the names have; None: there is none, or more than one."""
    if rules == {"pattern"}:
        pattern = names["pattern"]
        return PATTERNS.get(pattern, pattern) if isinstance(pattern, str) else None
    if rules == {"format"}:
        return UUID % (HEX, HEX) if names["format"] == "uuid" else FORMATS.get(str(names["format"]))
    if rules <= {"minLength", "maxLength"}:
        least, most = names.get("minLength", 0), names.get("maxLength", "")
        return f"^(?s:.{{{least},{most}}})$"
    return None
