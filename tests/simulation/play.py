"""Plays seeds one after the other and says what became of each. Knows no invariant: those are the
world's."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.simulation.seams import seams
from tests.simulation.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one seed."""

    seed: int
    problem: str | None
    """What broke; None when all invariants hold."""
    faults: tuple[str, ...]
    tally: Counter[str]
    """How often what the simulation is for came about."""

    def report(self) -> str:
        """For people: what broke, what struck before, how to see it again."""
        struck = "\n  ".join(self.faults)
        replay = f"python -m tests.simulation {self.seed}"
        return f"seed {self.seed}: {self.problem}\n  {struck}\n  replay: {replay}"


def play(seeds: Iterable[int]) -> Iterator[Outcome]:
    """Each seed in a world of its own. Whatever the product raises is what broke it."""
    with seams() as use:
        for seed in seeds:
            world = World.make(seed)
            use(world.loom)
            problem = None
            try:
                world.run()
            except Exception as error:  # noqa: BLE001 (any error is a finding)
                problem = _describe(error)
            world.stop()
            yield Outcome(
                seed=seed, problem=problem, faults=tuple(world.faults), tally=world.tally()
            )


def _describe(error: Exception) -> str:
    """With the place where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {frame.filename.rpartition('/')[2]}:{frame.lineno}: {error}"
