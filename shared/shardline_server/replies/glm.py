"""GLM 4.5 and later: the name behind <tool_call>, then <arg_key> and <arg_value> for each
argument."""

from __future__ import annotations

from shardline_server.replies.argument_writer import ArgumentWriter
from shardline_server.replies.attempt import attempt, read_name
from shardline_server.replies.hermes import CALL, END_CALL
from shardline_server.replies.reply_sink import ReplySink
from shardline_server.replies.text_source import CutOff, MarkerSet, Steps, TextSource
from shardline_server.replies.thinking import END_THINK, THINK, read_thoughtful

KEY = "<arg_key>"
END_KEY = "</arg_key>"
VALUE = "<arg_value>"
END_VALUE = "</arg_value>"
MARKERS = (CALL, END_CALL, KEY, END_KEY, VALUE, END_VALUE, THINK, END_THINK)

_CALL = MarkerSet(CALL)
_END_KEY = MarkerSet(END_KEY)
_ENDS = MarkerSet(END_VALUE, END_CALL)


def read(source: TextSource, sink: ReplySink, prompt_end: str) -> Steps[None]:
    """Reads a reply."""
    yield from read_thoughtful(source, sink, prompt_end, _read_answer, (CALL,))


def _read_answer(source: TextSource, sink: ReplySink) -> Steps[None]:
    while (yield from source.until(_CALL, sink.content)):
        yield from attempt(source, sink, CALL, _read_call(source, sink))


def _read_call(source: TextSource, sink: ReplySink) -> Steps[None]:
    yield from source.space()
    name = yield from read_name(source, sink)
    sink.begin_call(name)
    arguments = ArgumentWriter(sink, name)
    yield from source.space()
    word = yield from source.expect(KEY, END_CALL)
    while word == KEY:
        word = yield from _read_argument(source, arguments)
    arguments.end()


def _read_argument(source: TextSource, arguments: ArgumentWriter) -> Steps[str]:
    """Reads an argument and what follows it: the next one's beginning, or the call's end. The end
    of a value may be missing before that of the call, which may be part of a value, too."""
    key: list[str] = []
    if not (yield from source.until(_END_KEY, key.append)):
        raise CutOff
    yield from source.space()
    yield from source.expect(VALUE)
    parts: list[str] = []
    while True:
        marker = yield from source.until(_ENDS, parts.append)
        if marker is None:
            raise CutOff
        if marker == END_VALUE or (yield from source.follows(CALL, at_end=True)):
            break
        parts.append(marker)
    arguments.add_typed("".join(key).strip(), "".join(parts))
    if marker == END_CALL:
        return marker
    yield from source.space()
    return (yield from source.expect(KEY, END_CALL))
