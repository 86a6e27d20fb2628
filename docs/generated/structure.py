"""docs/structure.md: one line for each package folder, from its docstring, and the order of
imports."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
ROOTS = ("shared", "services")

INTRODUCTION = """# Structure

Each folder of code and what it is for. `make documents` writes this page from the docstrings of the
packages.
A folder may import those below it in its list of layers, never one above; import-linter checks it
with the contracts in `pyproject.toml`. The path of one prompt:
[services/README.md](../services/README.md).
"""


def page() -> str:
    """Returns the page in Markdown."""
    return "\n".join([INTRODUCTION, *_packages(), *_layers()])


def _packages() -> Iterator[str]:
    for root in ROOTS:
        yield from (f"## `{root}/`", "", "| folder | what it is for |", "|---|---|")
        for path in sorted(
            (REPOSITORY / root).rglob("__init__.py"), key=lambda path: path.parent.parts
        ):
            folder = path.parent.relative_to(REPOSITORY / root)
            if folder != Path():
                yield f"| `{folder}` | {_summary(path)} |"
        yield ""


def _summary(path: Path) -> str:
    """The first paragraph of a package's docstring, in one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.partition("\n\n")[0].split()).replace("|", "\\|")


def _layers() -> Iterator[str]:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    for contract in settings["tool"]["importlinter"]["contracts"]:
        if contract["type"] == "layers":
            yield from (f"## {contract['name']}", "", "```", *contract["layers"], "```", "")
