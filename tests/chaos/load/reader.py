"""A reader of one job's events over HTTP: leaves, is cut off, is slow, joins again where it was.
Knows no invariant."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import httpx

from tests.chaos.load.doors import gateway_client
from tests.chaos.load.journal import Journal, Watched

SILENCE_S = 10.0
"""Longer than a fault lasts: a stream that is still silent then is joined again."""

AGAIN_S = 0.2
LEAVES = 0.1
"""Share of events after which the reader leaves by itself."""
SLOW_S = 0.5
"""A slow reader looks at an event so long."""


class Reader:
    """One thread's reader; reads job after job."""

    def __init__(
        self,
        urls: Mapping[str, str],
        journal: Journal,
        rng: random.Random,
        given_up: threading.Event,
        *,
        slow: bool = False,
    ) -> None:
        self._urls = urls
        self._journal = journal
        self._rng = rng
        self._given_up = given_up
        self._slow = slow

    def read(self, job_id: UUID) -> Watched:
        """All events of one job, over as many connections as it takes."""
        watched = self._journal.watch(job_id)
        with gateway_client(self._urls, SILENCE_S) as client:
            while watched.end_state is None and not self._given_up.is_set():
                try:
                    self._join(client, watched)
                except httpx.HTTPError:
                    self._given_up.wait(AGAIN_S)
        return watched

    def _join(self, client: httpx.Client, watched: Watched) -> None:
        """One connection, until the end, an error, or the wish to leave. Its place travels as
        browsers send it, or as the start in the address."""
        watched.num_joins += 1
        route = f"/v1/jobs/{watched.job_id}/events"
        place = watched.place
        by_header = self._rng.random() < 0.5
        headers, query = ({"Last-Event-ID": place}, {}) if by_header else ({}, {"after": place})
        with client.stream("GET", route, headers=headers, params=query) as answer:
            answer.raise_for_status()
            for each in events(answer.iter_lines()):
                note(watched, each)
                self._journal.streamed()
                if watched.end_state is not None or self._rng.random() < LEAVES:
                    return
                if self._slow:
                    self._given_up.wait(SLOW_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One of a stream."""

    name: str
    place: str
    """Its id."""
    document: dict[str, Any]


def events(lines: Iterator[str]) -> Iterator[Event]:
    """Their fields come in any order, and an empty line ends them."""
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(": ")
        if line:
            fields[name] = value
        else:
            if "data" in fields:
                document = json.loads(fields["data"])
                yield Event(
                    name=fields.get("event", ""), place=fields.get("id", ""), document=document
                )
            fields = {}


def note(watched: Watched, event: Event) -> None:
    """What a careful client keeps of one event."""
    document = event.document
    watched.place = event.place
    if event.name == "interrupted" and not event.place.startswith(str(len(watched.tokens))):
        watched.gaps.append(
            f"the stream takes back its {len(watched.tokens)} tokens: {document.get('error')}"
        )
    if event.name == "delta":
        if document["start"] != len(watched.tokens):
            watched.gaps.append(
                f"an event starts at {document['start']}, {len(watched.tokens)} tokens were there"
            )
        watched.tokens += document["token_ids"]
        watched.text += document["text"]
        watched.logprobs += document.get("logprobs") or ()
    elif event.name == "end":
        watched.end_state = document["state"]
        result = document.get("result")
        watched.end_tokens = result["token_ids"] if result else None
