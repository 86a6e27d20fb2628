"""Mistral: [TOOL_CALLS] with a list of JSON objects, or, of later tokenizers, before each name with
[ARGS] before the arguments; [THINK] or <think> for reasoning."""

from __future__ import annotations

import re

from shardline_server.replies.attempt import attempt, read_name
from shardline_server.replies.json_call import read_arguments, read_calls
from shardline_server.replies.reply_sink import ReplySink
from shardline_server.replies.text_source import MarkerSet, Steps, TextSource
from shardline_server.replies.thinking import END_THINK, THINK, is_open_in, read_thoughtful

CALLS = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
BRACKET_THINK = "[THINK]"
END_BRACKET_THINK = "[/THINK]"
MARKERS = (CALLS, CALL_ID, ARGUMENTS, BRACKET_THINK, END_BRACKET_THINK, THINK, END_THINK)

_PARTS = MarkerSet(CALLS, BRACKET_THINK)
_END_THINK = MarkerSet(END_BRACKET_THINK)
_ID = re.compile(r"[A-Za-z0-9]*")


def read(source: TextSource, sink: ReplySink, prompt_end: str) -> Steps[None]:
    """Reads a reply."""
    if is_open_in(prompt_end, BRACKET_THINK, END_BRACKET_THINK):
        yield from _read_reasoning(source, sink)
        yield from _read_answer(source, sink)
    else:
        yield from read_thoughtful(source, sink, prompt_end, _read_answer, ())


def _read_answer(source: TextSource, sink: ReplySink) -> Steps[None]:
    while marker := (yield from source.until(_PARTS, sink.content)):
        if marker == CALLS:
            yield from attempt(source, sink, CALLS, _read_calls(source, sink))
        else:
            yield from _read_reasoning(source, sink)


def _read_reasoning(source: TextSource, sink: ReplySink) -> Steps[None]:
    if (yield from source.until(_END_THINK, sink.reasoning)):
        sink.end_reasoning()


def _read_calls(source: TextSource, sink: ReplySink) -> Steps[None]:
    if (yield from source.need()) in "[{":
        yield from read_calls(source, sink)
        return
    name = yield from read_name(source, sink)
    sink.begin_call(name)
    if (yield from source.accept(CALL_ID)):
        # Ours is the same in each stream, and unique.
        yield from source.run_of(_ID)
    yield from source.accept(ARGUMENTS)
    yield from read_arguments(source, sink)
    sink.end_call()
