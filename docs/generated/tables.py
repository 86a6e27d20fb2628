"""Tables in Markdown, as all generated pages write them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def table(*names: str, rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """The lines of a table with these names of columns, and an empty line after it."""
    yield _row(names)
    yield "|" + "---|" * len(names)
    yield from map(_row, rows)
    yield ""


def sentence(text: str) -> str:
    """The text with a capital letter, in one line."""
    line = " ".join(text.split())
    return line[:1].upper() + line[1:]


def _row(cells: Iterable[str]) -> str:
    return (
        "".join(f"| {cell.replace('|', chr(92) + '|')} " if cell else "| " for cell in cells) + "|"
    )
