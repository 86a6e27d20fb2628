"""Hermes, Qwen 2.5 and 3, SmolLM, Granite 3 and 4: JSON objects with name and arguments, or a list
of them, between <tool_call> and </tool_call>, or behind <|tool_call|>."""

from __future__ import annotations

from shardline_server.replies.attempt import attempt
from shardline_server.replies.json_call import read_calls
from shardline_server.replies.reply_sink import ReplySink
from shardline_server.replies.text_source import MarkerSet, Steps, TextSource
from shardline_server.replies.thinking import END_THINK, THINK, read_thoughtful

CALL = "<tool_call>"
END_CALL = "</tool_call>"
GRANITE_CALL = "<|tool_call|>"
MARKERS = (CALL, END_CALL, THINK, END_THINK)
GRANITE_MARKERS = (*MARKERS, GRANITE_CALL, "<response>", "</response>")

_CALL = MarkerSet(CALL)
_GRANITE = MarkerSet(CALL, GRANITE_CALL, "<response>", "</response>")


def read(source: TextSource, sink: ReplySink, prompt_end: str) -> Steps[None]:
    """Reads a reply of Hermes' form."""
    yield from read_thoughtful(source, sink, prompt_end, _read_answer, (CALL,))


def read_granite(source: TextSource, sink: ReplySink, prompt_end: str) -> Steps[None]:
    """Reads a reply of Granite's forms."""
    yield from read_thoughtful(source, sink, prompt_end, _read_granite_answer, (CALL, GRANITE_CALL))


def _read_answer(source: TextSource, sink: ReplySink) -> Steps[None]:
    while (yield from source.until(_CALL, sink.content)):
        yield from attempt(source, sink, CALL, _read_call(source, sink))


def _read_granite_answer(source: TextSource, sink: ReplySink) -> Steps[None]:
    while marker := (yield from source.until(_GRANITE, sink.content)):
        if marker == CALL:
            yield from attempt(source, sink, CALL, _read_call(source, sink))
        elif marker == GRANITE_CALL:
            yield from attempt(source, sink, marker, read_calls(source, sink))


def _read_call(source: TextSource, sink: ReplySink) -> Steps[None]:
    yield from read_calls(source, sink)
    yield from source.space()
    yield from source.expect(END_CALL)
