"""Llama 3: a JSON object, alone or behind <|python_tag|>; Llama 4: a list of calls as Python writes
them. Without a marker calls are looked for only where the reply begins."""

from __future__ import annotations

import re

from shardline_server.replies.attempt import attempt, read_name
from shardline_server.replies.json_call import read_call
from shardline_server.replies.json_text import text_of
from shardline_server.replies.python_literal import read_literal
from shardline_server.replies.reply_sink import ReplySink
from shardline_server.replies.text_source import MalformedCall, MarkerSet, Steps, TextSource

PYTHON_TAG = "<|python_tag|>"
PYTHON_START = "<|python_start|>"
PYTHON_END = "<|python_end|>"
MARKERS = (PYTHON_TAG, PYTHON_START, PYTHON_END)

_BEGINNINGS = MarkerSet(PYTHON_TAG, PYTHON_START)
_KEY = re.compile(r"\w*")


def read(source: TextSource, sink: ReplySink, _prompt_end: str) -> Steps[None]:
    """Reads a reply."""
    space = yield from source.space()
    sink.content(space)
    yield from _read_calls(source, sink, "")
    while marker := (yield from source.until(_BEGINNINGS, sink.content)):
        yield from _read_calls(source, sink, marker)


def _read_calls(source: TextSource, sink: ReplySink, marker: str) -> Steps[None]:
    """Reads JSON objects one after the other, or a list."""
    if (yield from source.follows("[")):
        yield from attempt(source, sink, marker, _read_list(source, sink, marker))
    elif marker or (yield from source.follows("{")):
        while (yield from attempt(source, sink, marker, read_call(source, sink))):
            marker = ""
            if (yield from source.follows(";", ",")):
                yield from source.space()
                marker = yield from source.accept(";", ",")
            if not (yield from source.follows("{")):
                sink.content(marker)
                return


def _read_list(source: TextSource, sink: ReplySink, marker: str) -> Steps[None]:
    yield from source.space()
    yield from source.expect("[")
    while True:
        yield from _read_python_call(source, sink)
        if (yield from source.need()) == "]":
            break
        yield from source.expect(",")
    yield from source.expect("]")
    if marker == PYTHON_START and (yield from source.follows(PYTHON_END)):
        yield from source.space()
        yield from source.expect(PYTHON_END)


def _read_python_call(source: TextSource, sink: ReplySink) -> Steps[None]:
    yield from source.space()
    name = yield from read_name(source, sink)
    sink.begin_call(name)
    yield from source.space()
    yield from source.expect("(")
    word = "{"
    while (yield from source.need()) != ")":
        key = yield from source.run_of(_KEY)
        if not key:
            raise MalformedCall
        yield from source.space()
        yield from source.expect("=")
        sink.arguments(f"{word}{text_of(key)}: ")
        yield from read_literal(source, sink.arguments)
        word = ", "
        if (yield from source.need()) != ")":
            yield from source.expect(",")
    yield from source.expect(")")
    sink.arguments("}" if word == ", " else "{}")
    sink.end_call()
