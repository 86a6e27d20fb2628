"""DeepSeek V3, R1 and V3.1: sections of calls with JSON; V3.2 and later: DSML, which has an element
for each argument."""

from __future__ import annotations

import re

from shardline_server.replies.argument_writer import ArgumentWriter
from shardline_server.replies.attempt import attempt, read_name
from shardline_server.replies.json_call import read_arguments
from shardline_server.replies.reply_sink import ReplySink
from shardline_server.replies.text_source import CutOff, MarkerSet, Steps, TextSource
from shardline_server.replies.thinking import END_THINK, THINK, read_thoughtful

CALLS = "<｜tool▁calls▁begin｜>"
END_CALLS = "<｜tool▁calls▁end｜>"
CALL = "<｜tool▁call▁begin｜>"
END_CALL = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
DSML = "｜DSML｜"
MARKERS = (CALLS, END_CALLS, CALL, END_CALL, SEPARATOR, DSML, THINK, END_THINK)

_SECTIONS = ("function_calls", "tool_calls", " calls")
_DSML_CALLS = tuple(f"<{DSML}{word}>" for word in _SECTIONS)
_DSML_END_CALLS = tuple(f"</{DSML}{word}>" for word in _SECTIONS)
_SPACES = ("", " ")
"""V4.1 writes a space before the words of elements."""
_INVOKE = tuple(f'<{DSML}{space}invoke name="' for space in _SPACES)
_END_INVOKE = tuple(f"</{DSML}{space}invoke>" for space in _SPACES)
_PARAMETER = tuple(f'<{DSML}{space}parameter name="' for space in _SPACES)
_END_PARAMETER = MarkerSet(*(f"</{DSML}{space}parameter>" for space in _SPACES))
_STRING = (' string="true"', ' string="false"')

_BEGINNINGS = MarkerSet(CALLS, *_DSML_CALLS)
_IN_CALLS = MarkerSet(CALL, END_CALLS)
_IN_DSML = MarkerSet(*_INVOKE, *_DSML_END_CALLS)
_KEY = re.compile(r'[^"]*')


def read(source: TextSource, sink: ReplySink, prompt_end: str) -> Steps[None]:
    """Reads a reply."""
    yield from read_thoughtful(source, sink, prompt_end, _read_answer, (CALLS, *_DSML_CALLS))


def _read_answer(source: TextSource, sink: ReplySink) -> Steps[None]:
    while section := (yield from source.until(_BEGINNINGS, sink.content)):
        markers = _IN_CALLS if section == CALLS else _IN_DSML
        while marker := (yield from source.until(markers, sink.content)):
            if marker == CALL:
                yield from attempt(source, sink, marker, _read_call(source, sink))
            elif marker in _INVOKE:
                yield from attempt(source, sink, marker, _read_invoke(source, sink))
            else:
                break


def _read_call(source: TextSource, sink: ReplySink) -> Steps[None]:
    name = yield from read_name(source, sink)
    yield from source.expect(SEPARATOR)
    is_fenced = (yield from source.need_char()) != "{"
    if is_fenced:
        # What stands before the separator is the type of the call.
        name = yield from read_name(source, sink)
        yield from source.space()
        yield from source.expect("```json")
    sink.begin_call(name)
    yield from read_arguments(source, sink)
    yield from source.space()
    if is_fenced:
        yield from source.expect("```")
        yield from source.space()
    yield from source.expect(END_CALL)
    sink.end_call()


def _read_invoke(source: TextSource, sink: ReplySink) -> Steps[None]:
    name = yield from read_name(source, sink)
    yield from source.expect('"')
    sink.begin_call(name)
    arguments = ArgumentWriter(sink, name)
    if (yield from source.expect(">", "/>")) == ">":
        yield from source.space()
        while (yield from source.expect(*_PARAMETER, *_END_INVOKE)) in _PARAMETER:
            yield from _read_parameter(source, arguments)
            yield from source.space()
    arguments.end()


def _read_parameter(source: TextSource, arguments: ArgumentWriter) -> Steps[None]:
    key = yield from source.run_of(_KEY)
    yield from source.expect('"')
    string = yield from source.accept(*_STRING)
    yield from source.expect(">")
    parts: list[str] = []
    if not (yield from source.until(_END_PARAMETER, parts.append)):
        raise CutOff
    text = "".join(parts)
    if not string:
        arguments.add_typed(key, text)
    elif string == _STRING[0]:
        arguments.add_string(key, text)
    else:
        arguments.add_value(key, text)
