"""The text of a completion as it comes, read by generators that pause where it ends so far. What
they read depends on the text alone, never on where it was cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

from shardline_server.replies.json_scanner import JsonScanner

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""A piece of a parser: it yields while it waits for more text, and returns what it has read."""

SPACE = re.compile(r"\s*")

MAX_SPACE_AHEAD = 64
"""Characters of white space that are looked through for what follows them."""


class MalformedCall(Exception):
    """The text is no call of this form."""


class CutOff(Exception):
    """The text ends inside a call, which is well-formed so far."""


def steps_taken(steps: Steps[T]) -> T:
    """Takes the steps of a parser with a closed source, and returns its result."""
    try:
        next(steps)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a closed source has no more text to wait for")


class MarkerSet:
    """Markers that are looked for together. None may begin with another one: which of two is there
    would depend on text that has not come yet."""

    __slots__ = ("beginnings", "longest", "pattern")

    def __init__(self, *markers: str) -> None:
        assert not any(a != b and b.startswith(a) for a in markers for b in markers), markers
        self.pattern = re.compile("|".join(map(re.escape, markers)))
        self.beginnings = {marker[:size] for marker in markers for size in range(1, len(marker))}
        self.longest = max(map(len, markers))

    def num_begun(self, text: str, start: int) -> int:
        """Returns how many characters at the end of `text[start:]` may be the start of a marker."""
        for size in range(min(self.longest - 1, len(text) - start), 0, -1):
            if text[len(text) - size :] in self.beginnings:
                return size
        return 0


class TextSource:
    """What has come and is not read yet, and the text of the call that is being read."""

    __slots__ = ("_at", "_call", "_has_ended", "_text")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._has_ended = False
        self._call: list[str] | None = None

    @classmethod
    def of(cls, text: str) -> TextSource:
        """Returns a source of the whole text, closed."""
        source = cls()
        source.push(text)
        source.close()
        return source

    def push(self, text: str) -> None:
        """Appends text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def close(self) -> None:
        """Ends the text."""
        self._has_ended = True

    def begin_call(self, marker: str) -> None:
        """Keeps what is read from here on, behind `marker`, which is read already."""
        self._call = [marker]

    def read_rest(self) -> None:
        """Reads what is left when the text has ended inside a word."""
        self._take(len(self._text))

    def end_call(self) -> str:
        """Returns the text read since `begin_call`."""
        assert self._call is not None
        text = "".join(self._call)
        self._call = None
        return text

    def _take(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        if self._call is not None and text:
            self._call.append(text)
        return text

    def _more(self) -> Steps[bool]:
        """Waits for text; returns False if there is no more."""
        if self._has_ended:
            return False
        yield
        return True

    def peek(self) -> Steps[str]:
        """Returns the next character without reading it, or nothing at the end."""
        while self._at == len(self._text):
            if not (yield from self._more()):
                return ""
        return self._text[self._at]

    def until(self, markers: MarkerSet, give: Callable[[str], object]) -> Steps[str | None]:
        """Gives the text before the first marker, reads the marker and returns it; None if the
        text ends without one."""
        while True:
            found = markers.pattern.search(self._text, self._at)
            if found:
                if found.start() > self._at:
                    give(self._take(found.start()))
                self._take(found.end())
                return found.group()
            held = markers.num_begun(self._text, self._at)
            if len(self._text) - held > self._at:
                give(self._take(len(self._text) - held))
            if not (yield from self._more()):
                if self._at < len(self._text):
                    give(self._take(len(self._text)))
                return None

    def rest(self, give: Callable[[str], object]) -> Steps[None]:
        """Gives all text to its end."""
        while True:
            if self._at < len(self._text):
                give(self._take(len(self._text)))
            if not (yield from self._more()):
                return

    def accept(self, *words: str) -> Steps[str]:
        """Reads the first of the words that comes next, and returns it; nothing if none does."""
        while True:
            rest = len(self._text) - self._at
            is_open = False
            for word in words:
                if self._text.startswith(word, self._at):
                    self._take(self._at + len(word))
                    return word
                if rest < len(word) and word.startswith(self._text[self._at :]):
                    is_open = True
                    break
            if not is_open or not (yield from self._more()):
                return ""

    def expect(self, *words: str) -> Steps[str]:
        """Reads one of the words, which must come next."""
        word = yield from self.accept(*words)
        if not word:
            raise CutOff if self._ends_inside(*words) else MalformedCall
        return word

    def _ends_inside(self, *words: str) -> bool:
        """Tells whether the text has ended inside one of the words, or before it."""
        rest = self._text[self._at : self._at + max(map(len, words))]
        return self._has_ended and any(word.startswith(rest) for word in words)

    def run_of(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Reads all characters that the pattern, a repeated class, matches."""
        parts: list[str] = []
        while True:
            found = pattern.match(self._text, self._at)
            if found and found.end() > self._at:
                parts.append(self._take(found.end()))
            if self._at < len(self._text) or not (yield from self._more()):
                return "".join(parts)

    def space(self) -> Steps[str]:
        """Reads white space."""
        return (yield from self.run_of(SPACE))

    def follows(self, *words: str, at_end: bool = False) -> Steps[bool]:
        """Tells whether one of the words comes next, behind white space, or with `at_end` nothing
        at all. Reads nothing."""
        while True:
            start = self._at
            while start < len(self._text) and self._text[start].isspace():
                start += 1
                if start - self._at > MAX_SPACE_AHEAD:
                    return False
            if any(self._text.startswith(word, start) for word in words):
                return True
            rest = self._text[start : start + max(map(len, words), default=0)]
            if rest and not any(word.startswith(rest) for word in words):
                return False
            if not (yield from self._more()):
                return at_end and not rest

    def need(self) -> Steps[str]:
        """Returns the next character behind white space, without reading it; the text may not end
        before it."""
        yield from self.space()
        char = yield from self.peek()
        if not char:
            raise CutOff
        return char

    def need_char(self) -> Steps[str]:
        """Returns the next character without reading it; the text may not end before it."""
        char = yield from self.peek()
        if not char:
            raise CutOff
        return char

    def json(self, give: Callable[[str], object]) -> Steps[None]:
        """Reads one JSON value behind white space and gives its text, in pieces."""
        yield from self.need()
        scanner = JsonScanner(give)
        while not scanner.is_done:
            end = scanner.scan(self._text, self._at)
            self._take(end)
            if scanner.is_broken:
                raise MalformedCall
            is_waiting = not scanner.is_done
            if is_waiting and not (yield from self._more()) and not scanner.finish():
                raise CutOff
