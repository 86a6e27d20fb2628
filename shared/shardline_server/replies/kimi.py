"""Kimi K2: sections of calls, with names in their ids; K3: elements between <|open|> and
<|close|>."""

from __future__ import annotations

import re
from collections.abc import Callable
from xml.sax.saxutils import unescape

from shardline_server.replies.argument_writer import ArgumentWriter
from shardline_server.replies.attempt import attempt
from shardline_server.replies.json_call import read_arguments
from shardline_server.replies.reply_sink import ReplySink
from shardline_server.replies.text_source import CutOff, MalformedCall, MarkerSet, Steps, TextSource
from shardline_server.replies.thinking import END_THINK, THINK, read_thoughtful

SECTIONS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
END_SECTIONS = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
CALL = "<|tool_call_begin|>"
END_CALL = "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
MARKERS = (*SECTIONS, *END_SECTIONS, CALL, END_CALL, ARGUMENTS, THINK, END_THINK)

OPEN = "<|open|>"
CLOSE = "<|close|>"
END_TAG = "<|sep|>"
K3_MARKERS = (OPEN, CLOSE, END_TAG)

_BEGINNINGS = MarkerSet(*SECTIONS, CALL)
_IN_SECTION = MarkerSet(CALL, *END_SECTIONS)
_ID = re.compile(r"[A-Za-z0-9_.:-]*")
_TAGS = MarkerSet(OPEN, CLOSE)
_TAG_TEXT = re.compile(r"[^<]*")
_END_ARGUMENT = f"{CLOSE}argument{END_TAG}"
_END_CALL = f"{CLOSE}call{END_TAG}"
_ARGUMENT = f"{OPEN}argument "
_ATTRIBUTE = re.compile(r'(\w{1,32})="([^"]*)"')


def read(source: TextSource, sink: ReplySink, prompt_end: str) -> Steps[None]:
    """Reads a reply of K2."""
    yield from read_thoughtful(source, sink, prompt_end, _read_answer, SECTIONS)


def _read_answer(source: TextSource, sink: ReplySink) -> Steps[None]:
    while marker := (yield from source.until(_BEGINNINGS, sink.content)):
        if marker == CALL:
            yield from attempt(source, sink, CALL, _read_call(source, sink))
            continue
        # Other text in a section is noise.
        while (yield from source.until(_IN_SECTION, _forget)) == CALL:
            yield from attempt(source, sink, CALL, _read_call(source, sink))


def _forget(_text: str) -> None:
    return None


def _read_call(source: TextSource, sink: ReplySink) -> Steps[None]:
    yield from source.space()
    call_id = yield from source.run_of(_ID)
    yield from source.space()
    yield from source.expect(ARGUMENTS)
    sink.begin_call(call_id.rpartition(":")[0].removeprefix("functions."), call_id)
    yield from read_arguments(source, sink)
    yield from source.space()
    yield from source.expect(END_CALL)
    sink.end_call()


def read_k3(source: TextSource, sink: ReplySink, prompt_end: str) -> Steps[None]:
    """Reads a reply of K3."""
    last_tag = prompt_end.rpartition(OPEN)[2].removesuffix(END_TAG)
    give: Callable[[str], None] = sink.reasoning if last_tag == "think" else sink.content
    while marker := (yield from source.until(_TAGS, give)):
        if give == sink.reasoning:
            sink.end_reasoning()
        tag = yield from source.run_of(_TAG_TEXT)
        is_tag = yield from source.accept(END_TAG)
        if not is_tag:
            if (yield from source.peek()):
                sink.content(marker + tag)
            continue
        if marker == OPEN and tag == "tools":
            yield from _read_tools(source, sink)
        give = sink.reasoning if marker == OPEN and tag == "think" else sink.content


def _read_tools(source: TextSource, sink: ReplySink) -> Steps[None]:
    call = f"{OPEN}call "
    while (yield from source.follows(call)):
        yield from source.space()
        yield from source.expect(call)
        yield from attempt(source, sink, call, _read_k3_call(source, sink))


def _read_k3_call(source: TextSource, sink: ReplySink) -> Steps[None]:
    attributes = yield from _read_attributes(source)
    name = attributes.get("tool", "")
    sink.begin_call(name)
    arguments = ArgumentWriter(sink, name)
    while (yield from source.expect(_ARGUMENT, _END_CALL)) == _ARGUMENT:
        attributes = yield from _read_attributes(source)
        text = yield from _read_argument(source)
        key = attributes.get("key", "")
        if attributes.get("type") == "string":
            arguments.add_string(key, text)
        elif "type" in attributes:
            arguments.add_value(key, text)
        else:
            arguments.add_typed(key, text)
    arguments.end()


def _read_attributes(source: TextSource) -> Steps[dict[str, str]]:
    text = yield from source.run_of(_TAG_TEXT)
    yield from source.expect(END_TAG)
    quotes = {"&quot;": '"', "&apos;": "'"}
    found = {key: unescape(value, quotes) for key, value in _ATTRIBUTE.findall(text)}
    if not found:
        raise MalformedCall
    return found


def _read_argument(source: TextSource) -> Steps[str]:
    """Reads a value to its end: what looks like one in a value is not followed by an element."""
    parts: list[str] = []
    while True:
        if not (yield from source.until(MarkerSet(_END_ARGUMENT), parts.append)):
            raise CutOff
        if (yield from source.follows(_ARGUMENT, _END_CALL, at_end=True)):
            return "".join(parts)
        parts.append(_END_ARGUMENT)
