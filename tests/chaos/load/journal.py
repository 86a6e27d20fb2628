"""What was asked, what was promised, and what readers saw: the harness's own memory. Knows no
server."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from tests.chaos.load.workload import PLAIN, SUCCEEDED, Dress
from tests.chaos.report.finding import Finding


@dataclass(slots=True, kw_only=True)
class Asked:
    """One job that somebody asked for."""

    id: UUID
    """Of a request with a key and no id of its own: a stand-in until its row is known."""
    number: int
    """Which request of the fixed set."""
    door: str
    dress: Dress = PLAIN
    ends: frozenset[str] = SUCCEEDED
    """States in which it may end."""
    promised: bool = False
    """The door has said that it is accepted."""
    asked_s: float = field(default_factory=time.monotonic)
    """When it was sent last."""
    num_sends: int = 0
    num_unanswered: int = 0
    """Sends that a door did not answer. Users also send again what was answered, and callers what
    they hung up on."""
    is_unsure: bool = False
    """The last answer was lost: whether the job is stored is unknown."""
    has_row: bool = False
    ended_at_s: float | None = None
    """By Postgres's clock."""

    @property
    def key(self) -> str | None:
        """Its idempotency key."""
        return self.dress.fields.get("idempotency_key")

    @property
    def own_id(self) -> UUID | None:
        """The id that it is sent with."""
        return self.id if self.key is None else None


@dataclass(slots=True, kw_only=True)
class Watched:
    """What one reader of one job's tokens saw, over all its connections."""

    job_id: UUID
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    place: str = "0"
    """The id of the last event: where a reader joins again."""
    logprobs: list[Any] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    """Events that did not go on where the one before ended."""
    end_state: str | None = None
    end_tokens: list[int] | None = None
    hears_partials: bool = True
    """Whether it is given the partial result of a job that was cancelled or expired."""
    num_joins: int = 0
    hears_calls: bool = False
    """Calls come beside the text, in place of a part of it."""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Name and arguments of each."""

    def hear_call(self, place: int, function: Mapping[str, Any]) -> None:
        """A part of one call: its name comes once, its arguments piece by piece."""
        if place == len(self.calls):
            self.calls.append(("", ""))
        name, arguments = self.calls[place]
        self.calls[place] = (
            name + (function.get("name") or ""),
            arguments + (function.get("arguments") or ""),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EventHeard:
    """One numbered event of a response."""

    number: int
    kind: str
    text: str
    """What it adds to the output's text."""
    digest: int
    """Of the whole event."""


@dataclass(slots=True, kw_only=True)
class ResponseHeard:
    """What one caller heard of one response."""

    job_id: UUID
    events: list[EventHeard] = field(default_factory=list)
    """Over all connections, one after the other."""
    again: list[EventHeard] | None = None
    """Of one connection that read all from the beginning, after the end."""
    document: Mapping[str, Any] | None = None
    """The whole response, of the last event."""
    is_diverged: bool = False
    """A stream said that the job goes on with other tokens."""
    num_joins: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextsHeard:
    """What a door answered of several texts or pairs."""

    numbers: Sequence[int]
    """Of their requests."""
    vectors: Sequence[Sequence[float]]
    """A score is a vector of one number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """How far accepted jobs had come at one moment."""

    at_s: float
    """Seconds since 1970."""
    open: frozenset[UUID]
    num_tokens: Mapping[UUID, int]
    """Of those that have a reader: who joins later catches up first, which is no progress."""


class Journal:
    """Written by the load's threads, read by the checker."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked: dict[UUID, Asked] = {}
        self._watched: list[Watched] = []
        self._responses: list[ResponseHeard] = []
        self._texts: list[TextsHeard] = []
        self._findings: list[Finding] = []

    def ask(self, asked: Asked) -> Asked:
        """Before a request leaves: also what is lost on its way is remembered."""
        with self._changed:
            self._asked[asked.id] = asked
        return asked

    def known(self, asked: Asked, job_id: UUID) -> None:
        """The row of a request that had only a key has this id."""
        with self._changed:
            if asked.id != job_id:
                del self._asked[asked.id]
                asked.id = job_id
                self._asked[job_id] = asked

    def complain(self, finding: Finding) -> None:
        """A door's answer broke a promise."""
        with self._changed:
            self._findings.append(finding)

    def complaints(self) -> list[Finding]:
        """All of them."""
        with self._changed:
            return list(self._findings)

    def watch(self, job_id: UUID) -> Watched:
        """A new reader."""
        watched = Watched(job_id=job_id)
        with self._changed:
            self._watched.append(watched)
        return watched

    def hear(self, response: ResponseHeard) -> None:
        """A response has a reader from now on."""
        with self._changed:
            self._responses.append(response)

    def responses(self) -> list[ResponseHeard]:
        """All that were read by their events."""
        with self._changed:
            return list(self._responses)

    def hear_texts(self, texts: TextsHeard) -> None:
        """A door has answered."""
        with self._changed:
            self._texts.append(texts)

    def texts(self) -> list[TextsHeard]:
        """All that doors answered of texts."""
        with self._changed:
            return list(self._texts)

    def streamed(self) -> None:
        """A reader has seen something new."""
        with self._changed:
            self._changed.notify_all()

    def has_rows(self, ids: Collection[UUID]) -> None:
        """These are committed."""
        with self._changed:
            for job_id in ids:
                self._asked[job_id].has_row = True

    def ended(self, ends: Collection[tuple[UUID, float]]) -> None:
        """These have ended, at this time of Postgres's clock (seconds since 1970)."""
        with self._changed:
            for job_id, ended_at_s in ends:
                self._asked[job_id].ended_at_s = ended_at_s
            self._changed.notify_all()

    def open(self, door: str | None = None) -> list[Asked]:
        """Those that have not ended, as far as anybody has looked."""
        with self._changed:
            return [
                each
                for each in self._asked.values()
                if each.ended_at_s is None and door in (None, each.door)
            ]

    def everything(self) -> list[Asked]:
        """All that was ever asked."""
        with self._changed:
            return list(self._asked.values())

    def readers(self) -> list[Watched]:
        """All that was ever watched."""
        with self._changed:
            return list(self._watched)

    def wait_for_end(self, since_s: float, timeout_s: float) -> float | None:
        """When the first job ended after `since_s` (seconds since 1970); None if none does within
        `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._first_end(since_s) is not None, timeout_s)
            return self._first_end(since_s)

    def wait_for(self, job_id: UUID, timeout_s: float) -> bool:
        """Whether this job ends within `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._asked[job_id].ended_at_s is not None, timeout_s
            )

    def mark(self) -> Mark:
        """From now on, what these jobs achieve is progress."""
        with self._changed:
            accepted = frozenset(
                each.id for each in self._asked.values() if each.has_row and each.ended_at_s is None
            )
            num_tokens = {
                each.job_id: len(each.tokens) for each in self._watched if each.job_id in accepted
            }
            return Mark(at_s=time.time(), open=accepted, num_tokens=num_tokens)

    def wait_for_progress(self, mark: Mark, timeout_s: float) -> float | None:
        """When a job of the mark ended or had a token more at its reader (seconds since 1970);
        None: not in time. If all of them turn out to have ended before it, any job will do."""
        with self._changed:
            self._changed.wait_for(lambda: self._progress(mark) is not None, timeout_s)
            return self._progress(mark)

    def wait_until_quiet(self, timeout_s: float) -> bool:
        """Whether everything ends within `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(
                lambda: all(each.ended_at_s is not None for each in self._asked.values()), timeout_s
            )

    def _first_end(self, since_s: float, among: Collection[UUID] | None = None) -> float | None:
        ends = (
            each.ended_at_s for each in self._asked.values() if among is None or each.id in among
        )
        return min((end_s for end_s in ends if end_s is not None and end_s > since_s), default=None)

    def _progress(self, mark: Mark) -> float | None:
        if any(
            len(each.tokens) > mark.num_tokens.get(each.job_id, len(each.tokens))
            for each in self._watched
        ):
            return time.time()
        accepted = [self._asked[job_id].ended_at_s for job_id in mark.open]
        none_left = all(
            ended_at_s is not None and ended_at_s <= mark.at_s for ended_at_s in accepted
        )
        return self._first_end(mark.at_s, None if none_left else mark.open)
