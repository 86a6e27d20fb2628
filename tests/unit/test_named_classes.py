"""Classes that docstrings and pages name in backticks exist: in the product, in the tests, or in
the C++ sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repository import REPOSITORY

PRODUCT = [
    path
    for folder in ("services", "shared")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
]
TESTS = sorted((REPOSITORY / "tests").rglob("*.py"))
SOURCES = [
    path
    for suffix in ("cpp", "h")
    for path in sorted((REPOSITORY / "services").rglob(f"*.{suffix}"))
]
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md")),
    *(
        path
        for folder in ("docs", "services")
        for path in sorted((REPOSITORY / folder).rglob("*.md"))
    ),
]
NAMED = re.compile(r"`([A-Z][a-z0-9]\w*(?:\.\w+)*)(?:\([^`]*\))?`")
DEFINED_IN_CPP = re.compile(r"\b(?:struct|enum|class) (\w+)")
FOREIGN = {
    "AsyncResult",  # Celery's
    "Host",  # a header of HTTP
    "MainThread",  # Python's own name of it
    "Raises",  # the section of a docstring
    "TimeoutStopSec",  # systemd's
}


def identifiers(path: Path) -> Iterator[str]:
    """Every name in a module's code; text is none."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield from (node.asname or node.name).split(".")


def texts(path: Path) -> Iterator[str]:
    """A page, or the docstrings of a module with its other texts."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield source
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.fixture(scope="module")
def known() -> set[str]:
    names = {name for path in (*PRODUCT, *TESTS) for name in identifiers(path)}
    return (
        names
        | FOREIGN
        | {name for path in SOURCES for name in DEFINED_IN_CPP.findall(path.read_text("utf-8"))}
    )


def test_every_class_that_docstrings_and_pages_name_exists(known: set[str]) -> None:
    missing = [
        f"{path.relative_to(REPOSITORY)}: {name}"
        for path in (*PRODUCT, *PAGES)
        for text in texts(path)
        for name in NAMED.findall(text)
        if not known.issuperset(name.split("."))
    ]
    assert missing == []
