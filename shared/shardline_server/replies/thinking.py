"""Reasoning between two markers, as most families write it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

from shardline_server.replies.reply_sink import ReplySink, merged
from shardline_server.replies.text_source import MarkerSet, Steps, TextSource, steps_taken

THINK = "<think>"
END_THINK = "</think>"

_TURNS = re.compile(r"<[|｜]|\[/INST\]|<turn\|>|<start_of_turn>")  # noqa: RUF001 - DeepSeek's bar
"""What templates write where another turn begins."""

Reader: TypeAlias = Callable[[TextSource, ReplySink], Steps[None]]
"""Reads a reply, or what follows its reasoning."""


def is_open_in(prompt_end: str, begin: str = THINK, end: str = END_THINK) -> bool:
    """Tells whether the prompt ends inside reasoning. A marker in a user's message begins none:
    another turn follows it."""
    _, marker, behind = prompt_end.rpartition(begin)
    return bool(marker) and end not in behind and not _TURNS.search(behind)


def read_thoughtful(
    source: TextSource,
    sink: ReplySink,
    prompt_end: str,
    answer: Reader,
    call_markers: tuple[str, ...],
) -> Steps[None]:
    """Reads reasoning, if the text begins with it or the prompt has begun it, and then the answer.
    A call inside reasoning is a thought, unless the reasoning never ends and only calls follow:
    then the model has forgotten to end it."""
    if is_open_in(prompt_end):
        # Some models begin it once more.
        yield from source.space()
        yield from source.accept(THINK)
    else:
        space = yield from source.space()
        if not (yield from source.accept(THINK)):
            sink.content(space)
            yield from answer(source, sink)
            return
    marker = yield from source.until(MarkerSet(END_THINK, *call_markers), sink.reasoning)
    if marker and marker != END_THINK:
        held = [marker]
        marker = yield from source.until(MarkerSet(END_THINK), held.append)
        text = "".join(held)
        if marker is None and _is_calls(text, sink, answer):
            sink.end_reasoning()
            steps_taken(answer(TextSource.of(text), sink))
            return
        sink.reasoning(text)
    if marker:
        sink.end_reasoning()
        yield from answer(source, sink)


def _is_calls(text: str, sink: ReplySink, answer: Reader) -> bool:
    probe = sink.probe()
    steps_taken(answer(TextSource.of(text), probe))
    probe.end()
    delta = merged(probe.take())
    return bool(delta.tool_calls) and not delta.content.strip()
