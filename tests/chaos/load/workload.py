"""A load's set of requests, and how producers dress each when they send it. Knows no door and no
server."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import cycle
from typing import Any

from tests.chaos.load.extremes import job_limits
from tests.chaos.load.requests import NUM_REQUESTS, Request, request
from tests.chaos.load.users import Speaks, users

BEYOND: Mapping[str, Any] = {"asked_by": "chaos, beyond all limits"}
"""Metadata of requests that no door may take, and no stage run."""
SUCCEEDED = frozenset({"succeeded"})
MARK: Mapping[str, Any] = {"asked_by": "chaos"}
"""Metadata of every request of a load: a row that has it and that nobody asked for is a second
job."""

KEYED = 0.5
"""Share of requests that have a key and no id of their own."""
DELAYED = 0.05
HURRIED = 0.05
PATIENT = 0.2
KEPT = frozenset({"idempotency_key", "priority"})
EXTREME = 0.1
"""Share of requests with one of a job's own numbers at a limit."""
DELAYS_S = (0.5, 4.0)
DEADLINES_S = (0.5, 6.0)
FAR_S = 3600.0
PRIORITIES = (0, 5, 5, 5, 9)
ADAPTED = 2
OUT_OF = 5
"""So many requests of a set are also asked of an adapter."""


def adapter_names(num: int) -> tuple[str, ...]:
    """Of the load's adapters, the same for each model."""
    return tuple(f"tuned-{place}" for place in range(num))


class LoadName(StrEnum):
    """Which load."""

    LAB = "lab"
    USERS = "users"
    ENCODERS = "encoders"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dress:
    """What a producer adds to a request of the set, the same at each repeat."""

    fields: Request = field(default_factory=lambda: {"metadata": MARK})
    ends: frozenset[str] = SUCCEEDED
    """States in which the job may end."""


PLAIN = Dress()


def is_completion(request: Request) -> bool:
    """Whether OpenAI's routes of completions take it, streamed too: they take no questions, and a
    stream has no log-probabilities of the prompt."""
    return "question" not in request and "prompt_logprobs" not in request


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One load."""

    name: LoadName
    requests: tuple[Request, ...]
    models: tuple[str, ...]
    dress: Callable[[random.Random], Dress]

    @property
    def is_users(self) -> bool:
        """Then producers repeat, cancel and come back."""
        return self.name is not LoadName.LAB

    @property
    def generates(self) -> bool:
        """Whether its models say tokens."""
        return self.name is not LoadName.ENCODERS

    def draw(self, rng: random.Random) -> int:
        """The number of any request."""
        return rng.randrange(len(self.requests))

    def draw_number(self, rng: random.Random, fits: Callable[[Request], bool]) -> int:
        """The number of any of the requests that fit."""
        return rng.choice([number for number, one in enumerate(self.requests) if fits(one)])

    def dressed(self, number: int, dress: Dress) -> dict[str, Any]:
        """The request as a producer sends it. A limit of crashes takes the place of a policy, which
        would set one too."""
        fields = {**self.requests[number], **dress.fields}
        if "max_crashes" in dress.fields:
            fields.pop("retry", None)
        return fields

    def with_adapters(self, names: Sequence[str]) -> Workload:
        """The same, with a share of its requests once more, for one adapter of their model after
        the other."""
        chosen = [one for number, one in enumerate(self.requests) if number % OUT_OF < ADAPTED]
        adapted = [
            {**one, "model": f"{one['model']}:{name}"}
            for one, name in zip(chosen, cycle(names), strict=False)
        ]
        return replace(self, requests=(*self.requests, *adapted))


def lab() -> Workload:
    """Every run before there were users had it: figures can be compared."""
    numbers = range(NUM_REQUESTS)
    requests = tuple(request(number) for number in numbers)
    return Workload(name=LoadName.LAB, requests=requests, models=("clerk",), dress=lambda _: PLAIN)


def of_users(models: Sequence[Speaks]) -> Workload:
    """See `users`."""
    names = tuple(model.name for model in models)
    return Workload(name=LoadName.USERS, requests=users(models), models=names, dress=dress_of_user)


def dress_of_user(rng: random.Random) -> Dress:
    """Keys, priorities, delays and deadlines as they come."""
    fields: dict[str, Any] = {"metadata": MARK, "priority": rng.choice(PRIORITIES)}
    ends = SUCCEEDED
    if rng.random() < KEYED:
        fields["idempotency_key"] = f"{rng.getrandbits(128):032x}"
    if rng.random() < DELAYED:
        fields["delay_s"] = rng.uniform(*DELAYS_S)
    if rng.random() < HURRIED:
        fields["deadline_s"] = rng.uniform(*DEADLINES_S)
        ends |= {"expired"}
    elif rng.random() < PATIENT:
        fields["deadline_s"] = FAR_S
    if rng.random() < EXTREME:
        more, ends = rng.choice(job_limits())
        fields = {"metadata": MARK, **{name: fields[name] for name in KEPT & fields.keys()}, **more}
    return Dress(fields=fields, ends=ends)
