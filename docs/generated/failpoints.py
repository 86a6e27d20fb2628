"""docs/reference/failpoints.md: every failpoint, from the members of `Point` and the text below
each."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

from docs.generated.tables import sentence, table
from shardline_server.failpoints import Point

INTRODUCTION = """# Failpoints

`make documents` writes this page from `shared/shardline_server/failpoints.py`. For tests only: a
file in the folder `SHARDLINE_FAILPOINTS` arms the point of its name. How the tests use them:
[testing](../testing.md).
Behind the colon stand the facts that a file's `when` may name.
"""


def page() -> str:
    """Returns the page in Markdown."""
    return "\n".join([INTRODUCTION, *table("point", "passed when", rows=_rows())])


def _rows() -> Iterator[tuple[str, str]]:
    (defined,) = ast.parse(inspect.getsource(Point)).body
    assert isinstance(defined, ast.ClassDef)
    names: list[str] = []
    for node in defined.body:
        if isinstance(node, ast.Assign):
            names.append(f"`{ast.literal_eval(node.value)}`")
        elif names and isinstance(node, ast.Expr):
            yield ", ".join(names), sentence(str(ast.literal_eval(node.value)))
            names = []
    assert not names, f"{names} have no text"
