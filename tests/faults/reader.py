"""A reader of one job's events over HTTP: leaves, is cut off, and joins again where it was. Knows no invariant."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import UUID

import httpx

from shardline.api_key import bearer
from tests.faults.journal import Journal, Watched

SILENCE_S = 10.0
"""Longer than a fault lasts: a stream that is still silent then is joined again."""

AGAIN_S = 0.2
LEAVES = 0.1
"""Share of events after which the reader leaves by itself."""


class Reader:
    """One thread's reader; reads job after job."""

    def __init__(
        self, urls: Mapping[str, str], journal: Journal, rng: random.Random, given_up: threading.Event
    ) -> None:
        self._urls = urls
        self._journal = journal
        self._rng = rng
        self._given_up = given_up

    def read(self, job_id: UUID) -> Watched:
        """All events of one job, over as many connections as it takes."""
        watched = self._journal.watch(job_id)
        key = bearer(self._urls["api_key"])
        with httpx.Client(base_url=self._urls["gateway"], headers=key, timeout=SILENCE_S) as client:
            while watched.end_state is None and not self._given_up.is_set():
                try:
                    self._join(client, watched)
                except httpx.HTTPError:
                    self._given_up.wait(AGAIN_S)
        return watched

    def _join(self, client: httpx.Client, watched: Watched) -> None:
        """One connection, until the end, an error, or the wish to leave."""
        watched.num_joins += 1
        headers = {"Last-Event-ID": str(len(watched.tokens))}
        with client.stream("GET", f"/v1/jobs/{watched.job_id}/events", headers=headers) as answer:
            answer.raise_for_status()
            for name, document in events(answer.iter_lines()):
                note(watched, name, document)
                self._journal.streamed()
                if watched.end_state is not None or self._rng.random() < LEAVES:
                    return


def events(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and data of each event."""
    name = ""
    for line in lines:
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def note(watched: Watched, name: str, document: dict[str, Any]) -> None:
    """What a careful client keeps of one event."""
    if name == "delta":
        if document["start"] != len(watched.tokens):
            watched.gaps.append(f"an event starts at {document['start']}, {len(watched.tokens)} tokens were there")
        watched.tokens += document["token_ids"]
    elif name == "end":
        watched.end_state = document["state"]
        result = document.get("result")
        watched.end_tokens = result["token_ids"] if result else None
