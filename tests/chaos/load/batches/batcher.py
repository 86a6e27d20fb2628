"""A caller of OpenAI's batches: uploads files, begins batches, cancels some, waits for their ends,
and reads their files while they run, at their end and when all is over. Knows no row."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import httpx

from tests.chaos.load.batches.sent_batch import BatchKind, SentBatch, draw_batch
from tests.chaos.load.doors import gateway_client, is_refusal
from tests.chaos.load.journal import Journal
from tests.chaos.load.workload import Workload
from tests.chaos.report.finding import Finding

FILES = "/v1/files"
BATCHES = "/v1/batches"
PATIENCE_S = 20.0
LOOK_S = 0.5
NUM_OPEN = 2
"""Beside one that expires, which takes a minute."""
KINDS = (
    BatchKind.LARGE,
    BatchKind.PLAIN,
    BatchKind.BROKEN,
    BatchKind.CANCELLED,
    BatchKind.PLAIN,
    BatchKind.REFUSED,
)
REPEATED = 0.3
"""Share of looks at which a batch is begun once more, which must give the one that is there."""
READ_EARLY = 0.2
PAGE = 7
READ = ("output_file_id", "error_file_id")


@dataclass(slots=True, kw_only=True)
class Batcher:
    """One thread's."""

    urls: Mapping[str, str]
    journal: Journal
    workload: Workload
    stopping: threading.Event
    drained: threading.Event
    rng: random.Random
    sent: list[SentBatch] = field(default_factory=list)
    is_done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Batch after batch until the load stops; those that are there are brought to their
        ends."""
        kinds = cycle(KINDS)
        open_batches: list[SentBatch] = []
        with gateway_client(self.urls, PATIENCE_S) as client:
            while not self.drained.wait(LOOK_S):
                if not self.stopping.is_set():
                    open_batches += self._next(open_batches, kinds)
                for each in list(open_batches):
                    if self._is_over(client, each):
                        open_batches.remove(each)
                if self.stopping.is_set() and not open_batches:
                    self._look_again(client)
                    self.is_done.set()
                    self.drained.wait()

    def _next(
        self, open_batches: list[SentBatch], kinds: Iterator[BatchKind]
    ) -> Iterator[SentBatch]:
        num = sum(each.kind is not BatchKind.EXPIRING for each in open_batches)
        if num == len(open_batches):
            yield self._draw(BatchKind.EXPIRING)
        if num < NUM_OPEN:
            yield self._draw(next(kinds))

    def _draw(self, kind: BatchKind) -> SentBatch:
        drawn = draw_batch(self.workload, self.rng, kind)
        self.sent.append(drawn)
        return drawn

    def _is_over(self, client: httpx.Client, batch: SentBatch) -> bool:
        """Goes one step on with a batch. Whether all of it was heard, or was refused."""
        try:
            return self._go_on(client, batch)
        except httpx.HTTPError as error:
            if not is_refusal(error):
                return False
            told = error.response.text[:300] if isinstance(error, httpx.HTTPStatusError) else ""
            self._complain("refused", f"{_named(batch)}: {error}: {told}")
            return True

    def _go_on(self, client: httpx.Client, batch: SentBatch) -> bool:
        if batch.file_id is None:
            form = {"file": ("in.jsonl", batch.content)}
            batch.file_id = _answer(client, "POST", FILES, files=form, data={"purpose": "batch"})[
                "id"
            ]
        if batch.created_s is None or self.rng.random() < REPEATED:
            self._begin(client, batch)
        route = f"{BATCHES}/{batch.document['id']}"
        if batch.is_to_be_cancelled(time.monotonic()):
            answer = client.post(f"{route}/cancel")
            if answer.status_code != httpx.codes.CONFLICT:  # It has ended.
                answer.raise_for_status()
            batch.is_cancelled = True
        batch.document = _answer(client, "GET", route)
        if batch.has_ended:
            batch.files = self._files(client, batch)
            return True
        if self.rng.random() < READ_EARLY:
            for content in self._files(client, batch).values():
                batch.early.update(lines_of(content))
        return False

    def _begin(self, client: httpx.Client, batch: SentBatch) -> None:
        asked = {
            "input_file_id": batch.file_id,
            "endpoint": batch.endpoint,
            "completion_window": batch.window,
            "metadata": {"name": batch.name},
        }
        key = {"Idempotency-Key": batch.name}
        answer = _answer(client, "POST", BATCHES, json=asked, headers=key)
        if batch.document and answer["id"] != batch.document["id"]:
            self._complain("duplicated", f"{_named(batch)}, begun again, is {answer['id']}")
        if batch.created_s is None:
            batch.document = answer
            batch.created_s = time.monotonic()

    def _files(self, client: httpx.Client, batch: SentBatch) -> dict[str, bytes]:
        names = {name: batch.document[name] for name in READ}
        found = {}
        for name, file_id in names.items():
            if file_id is not None:
                answer = client.get(f"{FILES}/{file_id}/content")
                answer.raise_for_status()
                found[name] = answer.content
        return found

    def _look_again(self, client: httpx.Client) -> None:
        """At the files of all that have ended, and at the list."""
        ended = [each for each in self.sent if each.has_ended]
        for batch in ended:
            while not batch.again and not self.drained.wait(0):
                try:
                    batch.again = self._files(client, batch)
                    break
                except httpx.HTTPError as error:
                    if is_refusal(error):
                        self._complain("refused", f"{_named(batch)}, read again: {error}")
                        break
                self.drained.wait(LOOK_S)
        wanted = sorted(each.document["id"] for each in self.sent if each.created_s is not None)
        listed = sorted(self._listed(client))
        if listed != wanted and not self.drained.is_set():
            self._complain("mistold", f"the list has {len(listed)} batches of {len(wanted)}")

    def _listed(self, client: httpx.Client) -> list[str]:
        found: list[str] = []
        query: dict[str, Any] = {"limit": PAGE}
        while not self.drained.wait(0):
            try:
                page = _answer(client, "GET", BATCHES, params=query)
            except httpx.HTTPError as error:
                if is_refusal(error):
                    self._complain("refused", f"the list of batches: {error}")
                    return found
                self.drained.wait(LOOK_S)
                continue
            found += [one["id"] for one in page["data"]]
            if not page["has_more"]:
                return found
            query["after"] = page["last_id"]
        return found

    def _complain(self, count: str, what: str) -> None:
        self.journal.complain(Finding(invariant="I11", count=count, what=what))


def lines_of(content: bytes) -> dict[str, bytes]:
    """The lines of a batch's file, by their ids: each begins with it."""
    return {line.split(b'"')[3].decode(): line for line in content.splitlines()}


def _answer(client: httpx.Client, method: str, route: str, **content: Any) -> dict[str, Any]:
    answer = client.request(method, route, **content)
    answer.raise_for_status()
    return dict(answer.json())


def _named(batch: SentBatch) -> str:
    return f"{batch.kind} batch {batch.document.get('id', batch.name)}"
