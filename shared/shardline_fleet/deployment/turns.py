"""Which model each worker serves, where workers may serve several: turns. Pure; knows no clock and
no server.

A worker stays with its model while that has jobs and no other model needs the worker. A model that
has jobs and no workers takes spare ones, then those of models without jobs, then those of the model
with the longest turn: only those needed to hold it, or all that the other had if it cannot go on
with the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

TURN_S = 60.0
"""A model with jobs keeps its workers so long, from the moment when it could serve."""
IDLE_TURN_S = 10.0
"""A model without jobs keeps them so long, since its next job may be on the way."""
LOADS_IN_TURN = 5.0
"""A turn also takes this many times what it took to begin: loading is at most a sixth of the
time."""
PATIENCE_S = 600.0
"""A model that cannot serve by then gives its workers away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """How a model stands."""

    is_wanted: bool = False
    """Jobs wait or run."""
    since_s: float = math.inf
    """Since it was given its workers, or lost them; infinite if it never had any."""
    served_s: float | None = None
    """Since a pipeline of it is ready; None if none is."""

    def is_over(self, scale: float) -> bool:
        """Whether another model may take its workers. `scale` is that of the protocol's times."""
        if not self.is_wanted:
            return self.since_s >= IDLE_TURN_S * scale
        if self.served_s is None:
            return self.since_s >= PATIENCE_S * scale
        load_s = max(0.0, self.since_s - self.served_s)
        return min(self.served_s, self.since_s) >= max(TURN_S * scale, LOADS_IN_TURN * load_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """All models, the workers that are here with the models that each may serve, and who holds
    what."""

    models: Mapping[str, Turn]
    offers: Mapping[str, Collection[str]]
    fits: Callable[[str, Collection[str]], bool]
    """Whether these workers hold a model."""
    scale: float = 1.0

    def assign(self, now: Mapping[str, str]) -> dict[str, str]:
        """Returns the model of each worker. `now` has those that serve one; they may be gone."""
        held = {
            worker: model for worker, model in now.items() if model in self.offers.get(worker, ())
        }
        given = dict(held)
        for model in sorted(self.models, key=lambda name: (-self.models[name].since_s, name)):
            if self._starves(model, given):
                given |= dict.fromkeys(self._taken(model, given, held), model)
        for worker in sorted(set(self.offers) - set(given)):
            given[worker] = min(self.offers[worker], key=lambda name: self._rank(name, given))
        return given

    def _starves(self, model: str, given: Mapping[str, str]) -> bool:
        turn = self.models[model]
        others = [
            worker
            for worker, models in self.offers.items()
            if model in models and given.get(worker) != model
        ]
        return (
            turn.is_wanted
            and turn.served_s is None
            and bool(others)
            and not self._lives(model, given)
        )

    def _lives(self, model: str, given: Mapping[str, str]) -> bool:
        own = _of(model, given)
        return bool(own) and self.fits(model, own)

    def _taken(self, model: str, given: Mapping[str, str], held: Mapping[str, str]) -> list[str]:
        """Returns the workers that the model takes so that it fits; none, if it would not fit with
        all that it may take."""
        taken: list[str] = []
        for donor, workers in self._donors(model, given, held):
            for place, worker in enumerate(workers):
                taken.append(worker)
                if self.fits(model, [*_of(model, given), *taken]):
                    rest = {each: its for each, its in given.items() if each not in taken}
                    if donor is not None and not self._lives(donor, rest):
                        taken += workers[place + 1 :]
                    return taken
        return []

    def _donors(
        self, model: str, given: Mapping[str, str], held: Mapping[str, str]
    ) -> Iterator[tuple[str | None, list[str]]]:
        """Yields workers that may serve the model: those of no model, then of each model with a
        turn that is over. No worker moves twice."""
        able = [worker for worker in sorted(self.offers) if model in self.offers[worker]]
        yield None, [worker for worker in able if worker not in given]
        others = [
            name for name in self.models if name != model and self.models[name].is_over(self.scale)
        ]
        for name in sorted(
            others, key=lambda name: (self.models[name].is_wanted, -self.models[name].since_s, name)
        ):
            yield name, [worker for worker in able if given.get(worker) == held.get(worker) == name]

    def _rank(self, model: str, given: Mapping[str, str]) -> tuple[bool, bool, str]:
        """Ranks where a worker without a model is of most use: with a model that has jobs, or at
        least workers."""
        return not self.models[model].is_wanted, not _of(model, given), model


def _of(model: str, given: Mapping[str, str]) -> list[str]:
    return [worker for worker, its in sorted(given.items()) if its == model]
