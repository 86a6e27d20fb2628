"""What a mutant is: one rule of the product broken on purpose, the tests that must notice, and how
a real stack must be hurt so that its judge notices. Knows no particular one.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Final

TWINS: Final = "tests/simulation/"
STATEMENTS: Final = f"{TWINS}statements.py"
RELAY_STATEMENTS: Final = f"{TWINS}relay_statements.py"
"""Rules that are SQL are broken twice: in the store, and here for the simulation alone."""


class Unfit(Exception):
    """The mutated copy does not run: what fails in it proves nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """`old` stands exactly once `within` a function, method or constant of `file`, by its dotted
    name; without one, in the whole file. How its lines are broken does not count, so only an edit
    of the broken rule itself touches it."""

    file: str
    within: str = ""
    old: str
    new: str

    def applied(self, source: str) -> str:
        """The file's text with the rule broken. Raises Unfit."""
        lines = source.splitlines(keepends=True)
        first, last = self._scope(source) if self.within else (0, len(lines))
        before, text, after = (
            "".join(part) for part in (lines[:first], lines[first:last], lines[last:])
        )
        found = list(re.finditer(r"\s+".join(map(re.escape, self.old.split())), text))
        if len(found) != 1:
            raise Unfit(f"{self.file}: {self.within or 'it'} has {len(found)} times {self.old!r}")
        return before + text[: found[0].start()] + self.new.strip() + text[found[0].end() :] + after

    def _scope(self, source: str) -> tuple[int, int]:
        """Index of the first line, and one past the last."""
        node: ast.AST = ast.parse(source)
        for name in self.within.split("."):
            named = [child for child in ast.iter_child_nodes(node) if _name_of(child) == name]
            if len(named) != 1:
                raise Unfit(f"{self.file}: no {self.within}")
            node = named[0]
        assert isinstance(node, ast.stmt)
        return node.lineno - 1, node.end_lineno or node.lineno


def _name_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.Assign):
        node = node.targets[0]
    elif isinstance(node, ast.AnnAssign):
        node = node.target
    return getattr(node, "name", None) or getattr(node, "id", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hurt:
    """A chaos run in which the judge must notice."""

    faults: str
    counts: tuple[str, ...]
    """Fields of chaos.json, of which at least one must rise."""
    minutes: float = 0.4
    seed: int = 1
    stages: int = 2
    replicas: int = 1
    dtype: str = "float32"
    exact: bool = True
    wide: bool = False
    """A random model with wide rows, see `wide_model`, instead of the demo model."""
    load: str = "lab"
    insecure: bool = False
    """Hops without CURVE, for faults that change frames."""
    redis_lasts: bool = False
    """The faults spare Redis: what it has taken is never sent again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A second line of defense: while it stands, nothing is to be seen in a real stack. It is
    broken there too."""

    name: str
    patches: tuple[Patch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One broken rule. `tests` are node ids; each must fail. `is_simulated`: so must the
    simulation's storms."""

    name: str
    patches: tuple[Patch, ...]
    tests: tuple[str, ...] = ()
    is_simulated: bool = False
    hurt: Hurt | None = None
    hidden_by: Layer | None = None
