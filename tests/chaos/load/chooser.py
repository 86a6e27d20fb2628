"""A caller of OpenAI's routes who asks for several choices under a key, until there is an answer,
and then once more: the same rows answer. Knows no row."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from tests.chaos.load.callers import ENDED, PAUSE_S, code_of, openai_form
from tests.chaos.load.doors import gateway_client, is_refusal, with_header
from tests.chaos.load.journal import Journal
from tests.chaos.load.workload import Workload
from tests.chaos.report.finding import Finding

MARK = "chaos, choices"
"""In the metadata of its jobs, which have `n` beside it: the judge counts them."""
NUM = (2, 3, 5)
PATIENCE_S = 60.0
BACK_S = (0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chooser:
    """One thread's."""

    urls: Mapping[str, str]
    journal: Journal
    workload: Workload
    stopping: threading.Event
    drained: threading.Event
    rng: random.Random

    def run(self) -> None:
        """Call after call until the load stops; the last one is brought to its end."""
        with gateway_client(self.urls, PATIENCE_S) as client:
            while not self.drained.wait(PAUSE_S):
                if not self.stopping.is_set():
                    self._ask(client)

    def _ask(self, client: httpx.Client) -> None:
        n = self.rng.choice(NUM)
        fields = {
            "n": n,
            "metadata": {"asked_by": MARK, "n": n},
            "idempotency_key": f"{self.rng.getrandbits(128):032x}",
        }
        request = self.workload.requests[self.workload.draw(self.rng)]
        route, document = openai_form({**request, **fields})
        first = self._answer(client, route, document)
        again = None if first is None else self._answer(client, route, document)
        if first is None or again is None:
            return
        if len(first["choices"]) != n:
            self._complain("lost", f"{n} choices were asked for: {len(first['choices'])} came")
        if first != again:
            self._complain("text_mismatches", f"{first['id']} asked for again: {again['id']}")

    def _answer(
        self, client: httpx.Client, route: str, document: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Asks until there is an answer. None: there will be none."""
        body, headers = with_header(document)
        while not self.drained.is_set():
            try:
                answer = client.post(route, json=body, headers=headers)
                if answer.is_success:
                    return dict(answer.json())
                if code_of(answer) in ENDED:
                    return None
                answer.raise_for_status()
            except httpx.HTTPError as error:
                if is_refusal(error):
                    self._complain("refused", f"choices were refused: {error}")
                    return None
            self.drained.wait(self.rng.uniform(*BACK_S))
        return None

    def _complain(self, count: str, what: str) -> None:
        self.journal.complain(Finding(invariant="I11", count=count, what=what))
