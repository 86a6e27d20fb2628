"""What a fault is. Knows no particular one."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol

from typing_extensions import TypeVar

from tests.chaos.stack.local_target import LocalTarget

StackT_contra = TypeVar("StackT_contra", contravariant=True, default=LocalTarget)
"""What a fault must know of the stack that it hurts: without a word, the stack of local
processes."""


class Fault(Protocol[StackT_contra]):
    """One way to hurt a stack."""

    @property
    def kind(self) -> str:
        """Its name in chaos.json."""

    @property
    def is_kill(self) -> bool:
        """Whether a process dies of it."""

    def missing(self, target: StackT_contra) -> str | None:
        """Why this machine or this stack cannot inject it; None if it can."""

    def strike(self, target: StackT_contra, rng: random.Random) -> None:
        """Inject and undo; bounded in time. Raises NotInjected, or Broken for what the judge cannot
        see afterwards."""


class NotInjected(Exception):
    """The fault could not be injected: it must not be counted."""


class Broken(Exception):
    """The fault was injected, and the stack did not do what is promised for it."""


def anywhere(target: object) -> None:
    """Most faults can be injected wherever the stack runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simple(Generic[StackT_contra]):
    """A fault made of functions."""

    kind: str
    inject: Callable[[StackT_contra, random.Random], None]
    is_kill: bool = False
    why_not: Callable[[StackT_contra], str | None] = anywhere

    def missing(self, target: StackT_contra) -> str | None:
        """As the function says."""
        return self.why_not(target)

    def strike(self, target: StackT_contra, rng: random.Random) -> None:
        """As the function does."""
        self.inject(target, rng)


def hold(duration_s: float) -> None:
    """The time for which a fault lasts."""
    threading.Event().wait(duration_s)
