"""Is the stack ready? Asks the way users do: over HTTP, in Postgres, in Flower. Starts and stops nothing."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import httpx
from sqlalchemy.exc import DBAPIError

from services.standalone.plan import Addresses
from shardline.api_key import bearer
from shardline.store.database import failure_of, transaction
from shardline.store.pipelines import num_ready

POLL_S = 0.25
CANARY_PROMPT = (0,)
"""A token id, because a model may have no tokenizer."""

CANARY_TOKENS = 2
"""The second token needs the first one to have come back to the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What must hold for a stack to be ready."""

    addresses: Addresses
    model: str
    num_pipelines: int
    canary_timeout_s: float


class NotYet(Exception):
    """Says what is still missing."""


def check(question: Question) -> None:
    """One look, ending with a completion through every stage. Raises NotYet."""
    try:
        _check_pipelines(question)
        key = bearer(question.addresses.api_key)
        with httpx.Client(base_url=question.addresses.gateway, headers=key, timeout=5.0) as gateway:
            if gateway.get("/ready").status_code != httpx.codes.OK:
                raise NotYet("the gateway is not ready")
            _check_flower(question)
            _send_canary(gateway, question)
    except httpx.TransportError as error:
        raise NotYet(f"no HTTP answer yet ({type(error).__name__})") from error
    except DBAPIError as error:
        raise NotYet(str(failure_of(error))) from error


def _check_pipelines(question: Question) -> None:
    with transaction(question.addresses.database) as connection:
        num = num_ready(connection, question.model)
    if num < question.num_pipelines:
        raise NotYet(f"{num} of {question.num_pipelines} pipelines are ready")


def _check_flower(question: Question) -> None:
    answer = httpx.get(f"{question.addresses.flower_with_credentials}/api/workers", timeout=5.0)
    if answer.status_code != httpx.codes.OK:
        raise NotYet("Flower is not ready")


def _send_canary(gateway: httpx.Client, question: Question) -> None:
    request = {
        "model": question.model,
        "prompt": CANARY_PROMPT,
        "max_tokens": CANARY_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = gateway.post("/v1/completions", json=request, timeout=question.canary_timeout_s)
    if answer.status_code != httpx.codes.OK:
        raise NotYet(f"the first completion got {answer.status_code}: {answer.text[:300]}")


class Watcher:
    """Asks again and again in a thread of its own, so that the main thread can tend its children."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._stop = threading.Event()
        self.ready = threading.Event()
        self.missing = "nothing was asked yet"
        self._thread = threading.Thread(target=self._watch, name="readiness", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                check(self._question)
            except NotYet as reason:
                self.missing = str(reason)
                self._stop.wait(POLL_S)
            else:
                self.ready.set()
                return

    def stop(self) -> None:
        """Ask no more; an answer under way is not waited for."""
        self._stop.set()
