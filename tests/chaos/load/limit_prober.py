"""A caller whose requests are all beyond a limit: each must be refused, or fail alone. Knows no
fault.

What a door says at once is heard here; what came of every one of them, the judge reads from the
rows.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID, uuid4

import httpx

from tests.chaos.load.doors import (
    AWAY,
    DOORS,
    PATIENCE_S,
    TAKEN,
    Answer,
    Door,
    gateway_client,
    is_refusal,
)
from tests.chaos.load.extremes import SAMPLED, beyond, no_number
from tests.chaos.load.journal import Journal
from tests.chaos.load.requests import MODEL, Request
from tests.chaos.load.workload import BEYOND
from tests.chaos.report.finding import Finding

EVERY_S = 0.5
BASE: Request = {"model": MODEL, "prompt": "beyond all limits", "max_tokens": 4, "metadata": BEYOND}


def by_completions(urls: Mapping[str, str]) -> Door:
    """`POST /v1/completions`, which answers with the completion."""
    client = gateway_client(urls, PATIENCE_S)

    def submit(_: UUID | None, request: Request) -> Answer:
        answer = client.post("/v1/completions", json=dict(request))
        answer.raise_for_status()
        return Answer(job_id=UUID(answer.json()["id"].removeprefix("cmpl-")))

    return submit


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitProber:
    """One thread's."""

    doors: Mapping[str, Door]
    journal: Journal
    stopping: threading.Event
    drained: threading.Event
    rng: random.Random

    @classmethod
    def doors_of(cls, urls: Mapping[str, str]) -> Mapping[str, Door]:
        """All that a stack has."""
        return {
            **{name: door(urls) for name, door in DOORS.items()},
            "completions": by_completions(urls),
        }

    def run(self) -> None:
        """Request after request until the load stops."""
        while not self.drained.wait(EVERY_S):
            if not self.stopping.is_set():
                self.probe()

    def probe(self) -> None:
        """One request, through any door."""
        name = self.rng.choice(sorted(self.doors))
        # OpenAI's routes take neutral values of many kinds.
        values = beyond() if name == "completions" else [*beyond(), *no_number()]
        if name == "sql":
            # Columns have casts of their own.
            values = [fields for fields in values if fields.keys() <= SAMPLED.keys()]
        fields = self.rng.choice(values)
        try:
            answer = self.doors[name](uuid4(), {**BASE, **fields})
        except AWAY as error:
            if (
                isinstance(error, httpx.HTTPStatusError)
                and error.response.is_server_error
                and is_refusal(error)
            ):
                self._complain(
                    f"{name} met {fields} with {error.response.status_code}:"
                    f" {error.response.text[:300]}"
                )
            return
        if answer != TAKEN and name != "sql":
            self._complain(f"{name} took {fields}", answer.job_id)

    def _complain(self, what: str, job_id: UUID | None = None) -> None:
        self.journal.complain(
            Finding(invariant="I11", count="admitted", what=what[:500], job_id=job_id)
        )
