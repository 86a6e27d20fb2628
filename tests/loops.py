"""Finds every loop of the product in its code: what runs until the process ends, in a thread or a
task of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.repository import REPOSITORY

PACKAGES = ("services", "shared")
THREADS = {"Thread", "threading.Thread", "Loop"}
"""Base classes whose subclasses are threads: `Loop` is the relay's."""


def loops() -> set[str]:
    """`module.Class` of each subclass of a thread, and `module.Class.method` or `module.function`
    of whatever a thread or a task is made of."""
    return {
        name
        for package in PACKAGES
        for path in (REPOSITORY / package).rglob("*.py")
        for name in _of(path)
    }


def _of(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    module = (
        str(path.relative_to(REPOSITORY).with_suffix("")).removeprefix("shared/").replace("/", ".")
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            if THREADS & {ast.unparse(base) for base in node.bases} and not _is_abstract(node):
                yield f"{module}.{node.name}"
            for made in filter(None, map(_target, ast.walk(node))):
                if made.startswith("self."):
                    yield f"{module}.{node.name}.{made.removeprefix('self.')}"
        elif (target := _target(node)) is not None and not target.startswith("self."):
            yield f"{module}.{target}"


def _is_abstract(node: ast.ClassDef) -> bool:
    return "ABC" in {ast.unparse(base) for base in node.bases}


def _target(node: ast.AST) -> str | None:
    """What a call makes a thread or a task of."""
    if not isinstance(node, ast.Call):
        return None
    made = ast.unparse(node.func)
    if made.endswith("create_task") and isinstance(node.args[0], ast.Call):
        return ast.unparse(node.args[0].func)
    if made in THREADS:
        return next(
            (ast.unparse(word.value) for word in node.keywords if word.arg == "target"), None
        )
    return None
