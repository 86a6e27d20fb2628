"""Qwen 3 Coder, Qwen 3.5 and later: <function=name> with a <parameter=key> for each argument."""

from __future__ import annotations

import re

from shardline_server.replies.argument_writer import ArgumentWriter
from shardline_server.replies.attempt import attempt, read_name
from shardline_server.replies.hermes import CALL, END_CALL
from shardline_server.replies.reply_sink import ReplySink
from shardline_server.replies.text_source import CutOff, MarkerSet, Steps, TextSource
from shardline_server.replies.thinking import END_THINK, THINK, read_thoughtful

FUNCTION = "<function="
END_FUNCTION = "</function>"
PARAMETER = "<parameter="
END_PARAMETER = "</parameter>"
MARKERS = (CALL, END_CALL, THINK, END_THINK)

_CALLS = MarkerSet(CALL, FUNCTION)
_ENDS = MarkerSet(END_PARAMETER, PARAMETER, END_FUNCTION)
_KEY = re.compile(r"[^<>\n]*")


def read(source: TextSource, sink: ReplySink, prompt_end: str) -> Steps[None]:
    """Reads a reply."""
    yield from read_thoughtful(source, sink, prompt_end, _read_answer, (CALL, FUNCTION))


def _read_answer(source: TextSource, sink: ReplySink) -> Steps[None]:
    while marker := (yield from source.until(_CALLS, sink.content)):
        yield from attempt(source, sink, marker, _read_call(source, sink, marker))


def _read_call(source: TextSource, sink: ReplySink, marker: str) -> Steps[None]:
    if marker == CALL:
        yield from source.space()
        yield from source.expect(FUNCTION)
    name = yield from read_name(source, sink)
    yield from source.expect(">")
    sink.begin_call(name)
    arguments = ArgumentWriter(sink, name)
    yield from source.space()
    word = yield from source.expect(PARAMETER, END_FUNCTION)
    while word == PARAMETER:
        word = yield from _read_parameter(source, arguments)
    arguments.end()
    if (yield from source.follows(END_CALL)):
        yield from source.space()
        yield from source.expect(END_CALL)


def _read_parameter(source: TextSource, arguments: ArgumentWriter) -> Steps[str]:
    """Reads an argument and what follows it: the next one's beginning, or the function's end. Its
    end may be missing, and its value may have markers: what follows them tells."""
    key = yield from source.run_of(_KEY)
    yield from source.expect(">")
    parts: list[str] = []
    word = ""
    while not word:
        marker = yield from source.until(_ENDS, parts.append)
        begins_line = bool(parts) and parts[-1].endswith("\n")
        if marker is None:
            raise CutOff
        if marker == END_PARAMETER and (yield from source.follows(PARAMETER, END_FUNCTION)):
            yield from source.space()
            word = yield from source.expect(PARAMETER, END_FUNCTION)
        elif marker == END_FUNCTION and begins_line:
            if (yield from source.follows(END_CALL, at_end=True)):
                word = marker
        elif marker == PARAMETER and begins_line:
            word = marker
        if not word:
            parts.append(marker)
    text = "".join(parts)
    if text.startswith("\n"):
        text = text[1:].removesuffix("\n")
    arguments.add_typed(key.strip(), text)
    return word
