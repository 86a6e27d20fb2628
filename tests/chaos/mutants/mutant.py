"""What a mutant is: one rule of the product broken on purpose, the tests that must notice, and how a real stack must be
hurt so that its judge notices. Knows no particular one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TWINS: Final = "tests/simulation/"
STATEMENTS: Final = f"{TWINS}statements.py"
RELAY_STATEMENTS: Final = f"{TWINS}relay_statements.py"
"""Rules that are SQL are broken twice: in the store, and here for the simulation alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """`old` stands exactly once in `file`."""

    file: str
    old: str
    new: str


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
    """A second line of defense: while it stands, nothing is to be seen in a real stack. It is broken there too."""

    name: str
    patches: tuple[Patch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One broken rule. `tests` are node ids; each must fail. `is_simulated`: so must the simulation's storms."""

    name: str
    patches: tuple[Patch, ...]
    tests: tuple[str, ...] = ()
    is_simulated: bool = False
    hurt: Hurt | None = None
    hidden_by: Layer | None = None
