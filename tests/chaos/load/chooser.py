"""Callers of OpenAI's routes who want whole answers under a key, until there is one, and then once
more: the same rows answer. This one asks for several choices. Knows no row."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.chaos.load.callers import ENDED, PAUSE_S, code_of, openai_form
from tests.chaos.load.doors import gateway_client, is_refusal, told_by, with_header
from tests.chaos.load.journal import Journal
from tests.chaos.load.workload import Workload, is_completion
from tests.chaos.report.finding import Finding

MARK = "chaos, choices"
"""In the metadata of its jobs, which have `n` beside it: the judge counts them."""
NUM = (2, 3, 5)
PATIENCE_S = 60.0
BACK_S = (0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Customer:
    """One who asks at the gateway, and asks again while it is away."""

    journal: Journal
    workload: Workload
    drained: threading.Event
    rng: random.Random

    def ask(self, client: httpx.Client) -> None:
        """One request, to its end."""
        raise NotImplementedError

    def fields(self, n: int) -> dict[str, Any]:
        """Of a request that becomes so many rows."""
        return {
            "metadata": {"asked_by": MARK, "n": n},
            "idempotency_key": f"{self.rng.getrandbits(128):032x}",
        }

    def answer(
        self, client: httpx.Client, route: str, document: Mapping[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """Asks until there is an answer; without a document, for what is there. None: there will be
        none."""
        body, headers = with_header(document or {})
        while not self.drained.is_set():
            try:
                answer = (
                    client.get(route)
                    if document is None
                    else client.post(route, json=body, headers=headers)
                )
                if answer.is_success:
                    return dict(answer.json())
                if code_of(answer) in ENDED:
                    return None
                answer.raise_for_status()
            except httpx.HTTPError as error:
                if is_refusal(error):
                    self.complain("refused", f"{route} refused a good request: {told_by(error)}")
                    return None
            self.drained.wait(self.rng.uniform(*BACK_S))
        return None

    def twice(
        self, client: httpx.Client, route: str, document: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The answers to a request and to its repeat. None: there is none."""
        first = self.answer(client, route, document)
        again = None if first is None else self.answer(client, route, document)
        return None if first is None or again is None else (first, again)

    def complain(self, count: str, what: str) -> None:
        """A door's answer broke a promise."""
        self.journal.complain(Finding(invariant="I11", count=count, what=what))


@dataclass(frozen=True, slots=True, kw_only=True)
class Customers:
    """Several in one thread, who ask in turn."""

    urls: Mapping[str, str]
    customers: Sequence[Customer]
    stopping: threading.Event
    drained: threading.Event
    rng: random.Random

    def run(self) -> None:
        """Request after request until the load stops; the last one is brought to its end."""
        with gateway_client(self.urls, PATIENCE_S) as client:
            while not self.drained.wait(PAUSE_S):
                if not self.stopping.is_set():
                    self.rng.choice(self.customers).ask(client)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chooser(Customer):
    """Asks for several choices."""

    def ask(self, client: httpx.Client) -> None:
        """One request, and its repeat."""
        n = self.rng.choice(NUM)
        number = self.workload.draw_number(self.rng, is_completion)
        route, document = openai_form({**self.workload.requests[number], "n": n, **self.fields(n)})
        answers = self.twice(client, route, document)
        if answers is None:
            return
        first, again = answers
        if len(first["choices"]) != n:
            self.complain("lost", f"{n} choices were asked for: {len(first['choices'])} came")
        if first != again:
            other = {name: (first.get(name), again.get(name)) for name in {*first, *again}}
            unlike = {name: pair for name, pair in other.items() if pair[0] != pair[1]}
            self.complain("text_mismatches", f"{first['id']} asked for again: {unlike}")
