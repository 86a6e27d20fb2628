"""A producer that never stops pushing jobs through the gateways, however they come and go, and what
became of them."""

from __future__ import annotations

import random
import threading
from types import TracebackType
from typing import Self
from uuid import UUID, uuid4

import httpx
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random

from shardline.contract.api_key import bearer
from tests.compose.stack import MODEL, PATIENCE_S, Stack, until

PACE_S = 0.3
MAX_TOKENS = (8, 24)
NUM_SHORT = 5


class Refused(Exception):
    """An answer that says to try again."""


class Load:
    """Jobs with ids of our own, so that a request repeated after a lost answer is no second job."""

    def __init__(self, gateways: list[str], api_key: str, *, seed: int) -> None:
        self.gateways = gateways
        self._key = bearer(api_key)
        self.accepted: dict[UUID, int] = {}
        """Job → tokens that it must have."""
        self._random = random.Random(seed)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._push, name="load", daemon=True)
        self._error: BaseException | None = None

    def push(self, max_tokens: int) -> None:
        """One job: back when a gateway has said that it is committed."""
        job_id = uuid4()
        patient = Retrying(
            retry=retry_if_exception_type((httpx.TransportError, Refused)),
            wait=wait_random(0, 0.5),
            stop=stop_after_delay(PATIENCE_S),
            reraise=True,
        )
        patient(self._post, job_id, max_tokens)
        self.accepted[job_id] = max_tokens

    def _post(self, job_id: UUID, max_tokens: int) -> None:
        prompt = f"sort: {self._random.randrange(100)}, {self._random.randrange(100)} ="
        request = {
            "id": str(job_id),
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
        }
        url = f"{self._random.choice(self.gateways)}/v1/jobs"
        answer = httpx.post(url, json=request, headers=self._key, timeout=10)
        if answer.status_code in {429, 502, 503, 504}:
            raise Refused(answer.text)
        assert answer.status_code in {200, 202}, answer.text

    def _push(self) -> None:
        try:
            while not self._ending.wait(PACE_S):
                self.push(self._random.randint(*MAX_TOKENS))
        except (httpx.HTTPError, Refused, AssertionError) as error:
            self._error = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ending.set()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error


def push_on(load: Load) -> None:
    """Until some more jobs were accepted."""
    wanted = len(load.accepted) + NUM_SHORT
    until(lambda: len(load.accepted) >= wanted)


def num_unfinished(stack: Stack) -> int:
    """Jobs that wait or run."""
    return stack.number("SELECT count(*) FROM jobs WHERE state IN ('queued', 'running')")


def once_each(load: Load) -> dict[str, tuple[str, ...]]:
    """What `ends` must be."""
    return {
        str(job): ("succeeded", str(num_tokens), "1") for job, num_tokens in load.accepted.items()
    }


def ends(stack: Stack, load: Load) -> dict[str, tuple[str, ...]]:
    """Job → state, tokens of its result, attempts that succeeded."""
    rows = stack.sql(
        "SELECT jobs.id, state, completion_tokens, count(*) FILTER (WHERE outcome = 'succeeded')"
        " FROM jobs LEFT JOIN results ON results.job_id = jobs.id"
        " LEFT JOIN attempts ON attempts.job_id = jobs.id"
        " GROUP BY jobs.id, state, completion_tokens"
    )
    accepted = {str(job) for job in load.accepted}
    return {job: tuple(rest) for job, *rest in rows if job in accepted}
