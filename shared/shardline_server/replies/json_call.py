"""Calls that are JSON objects: {"name": ..., "arguments": {...}}, in any order of keys."""

from __future__ import annotations

from shardline_server.replies.json_text import text_of, value_of
from shardline_server.replies.reply_sink import ReplySink
from shardline_server.replies.text_source import MalformedCall, Steps, TextSource

_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")
"""Models of a family that is taught the one write the other too."""


def read_arguments(source: TextSource, sink: ReplySink) -> Steps[None]:
    """Reads a JSON object and passes it on as the arguments of the call that has begun."""
    if (yield from source.need()) != "{":
        raise MalformedCall
    yield from source.json(sink.arguments)


def read_calls(source: TextSource, sink: ReplySink) -> Steps[None]:
    """Reads one call, or a list of calls."""
    if (yield from source.need()) == "{":
        yield from read_call(source, sink)
        return
    yield from source.expect("[")
    while True:
        yield from read_call(source, sink)
        if (yield from source.need()) == "]":
            break
        yield from source.expect(",")
    yield from source.expect("]")


def read_call(source: TextSource, sink: ReplySink) -> Steps[None]:
    """Reads one call. Arguments behind the name are passed on as they come."""
    before: dict[str, str] = {}
    """The values that came before the name, by their keys."""
    name: str | None = None
    has_arguments = False
    yield from source.space()
    yield from source.expect("{")
    while (yield from source.need()) != "}":
        key = yield from _read_key(source)
        is_arguments = key in _ARGUMENTS and not has_arguments
        if name is not None and is_arguments and (yield from source.need()) == "{":
            yield from source.json(sink.arguments)
            has_arguments = True
        else:
            value = yield from _read_value(source)
            if key == _NAME and name is None:
                name = _name_of(value)
                sink.begin_call(name)
                early = [before[one] for one in _ARGUMENTS if one in before]
                if early:
                    sink.arguments(_object_text(early[0]))
                    has_arguments = True
            elif name is None:
                before[key] = value
            elif is_arguments:
                sink.arguments(_object_text(value))
                has_arguments = True
        if (yield from source.need()) != "}":
            yield from source.expect(",")
    yield from source.expect("}")
    if name is None:
        raise MalformedCall
    if not has_arguments:
        sink.arguments("{}")
    sink.end_call()


def _read_key(source: TextSource) -> Steps[str]:
    if (yield from source.need()) != '"':
        raise MalformedCall
    key = yield from _read_value(source)
    yield from source.space()
    yield from source.expect(":")
    return str(value_of(key))


def _read_value(source: TextSource) -> Steps[str]:
    parts: list[str] = []
    yield from source.json(parts.append)
    return "".join(parts)


def _name_of(value: str) -> str:
    name = value_of(value)
    if not isinstance(name, str):
        raise MalformedCall
    return name


def _object_text(value: str) -> str:
    """Returns the arguments as an object: some models write them as a string, or null for none."""
    found = value_of(value)
    if isinstance(found, str):
        try:
            found = value_of(found or "{}")
        except ValueError:
            raise MalformedCall from None
        value = text_of(found)
    if found is None:
        return "{}"
    if not isinstance(found, dict):
        raise MalformedCall
    return value
