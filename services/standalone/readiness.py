"""Checks that a stack is ready, the way users would: over HTTP, in Postgres, in Flower. Starts and
stops nothing."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from sqlalchemy.exc import DBAPIError

from services.standalone.plan import Addresses
from shardline.contract.api_key import bearer
from shardline.contract.encoders.encoder import GENERATE, EncoderTask
from shardline.store.connection.database import failure_of, transaction
from shardline.store.pipelines import num_ready

POLL_S = 0.25
CANARY_PROMPT = (0,)
"""A token id, because a model may have no tokenizer."""

CANARY_TOKENS = 2
"""The second token needs the first one to have come back to the head."""

CANARIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    GENERATE: (
        "/v1/completions",
        {
            "prompt": CANARY_PROMPT,
            "max_tokens": CANARY_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        },
    ),
    EncoderTask.EMBED: ("/v1/embeddings", {"input": CANARY_PROMPT}),
    EncoderTask.SCORE: ("/v1/score", {"text_1": "0", "text_2": "0"}),
}
"""A route and a request for each task of models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadinessCriteria:
    """What must hold for a stack to be ready."""

    addresses: Addresses
    model: str
    num_pipelines: int
    canary_timeout_s: float


class NotReady(Exception):
    """The stack is not ready; the message tells what is missing."""


def check(criteria: ReadinessCriteria) -> None:
    """Check once, at last with a completion through every stage, whatever proxies the environment
    names. Raises NotReady."""
    try:
        _check_pipelines(criteria)
        key = bearer(criteria.addresses.api_key)
        address = criteria.addresses.gateway
        with httpx.Client(base_url=address, headers=key, timeout=5.0, trust_env=False) as gateway:
            if gateway.get("/ready").status_code != httpx.codes.OK:
                raise NotReady("the gateway is not ready")
            _check_flower(criteria)
            _send_canary(gateway, criteria)
    except httpx.TransportError as error:
        raise NotReady(f"no HTTP answer yet ({type(error).__name__})") from error
    except DBAPIError as error:
        raise NotReady(str(failure_of(error))) from error


def _check_pipelines(criteria: ReadinessCriteria) -> None:
    with transaction(criteria.addresses.database) as connection:
        num = num_ready(connection, criteria.model)
    if num < criteria.num_pipelines:
        raise NotReady(f"{num} of {criteria.num_pipelines} pipelines are ready")


def _check_flower(criteria: ReadinessCriteria) -> None:
    url = f"{criteria.addresses.flower_with_credentials}/api/workers"
    answer = httpx.get(url, timeout=5.0, trust_env=False)
    if answer.status_code != httpx.codes.OK:
        raise NotReady("Flower is not ready")


def _send_canary(gateway: httpx.Client, criteria: ReadinessCriteria) -> None:
    card = gateway.get(f"/v1/models/{criteria.model}")
    task = card.json()["task"] if card.status_code == httpx.codes.OK else GENERATE
    path, fields = CANARIES[task]
    request = {"model": criteria.model, **fields}
    answer = gateway.post(path, json=request, timeout=criteria.canary_timeout_s)
    if answer.status_code != httpx.codes.OK:
        raise NotReady(f"the first answer got {answer.status_code}: {answer.text[:300]}")


class ReadinessWatcher:
    """Repeats the check on a separate thread, while the main thread watches the children."""

    def __init__(self, criteria: ReadinessCriteria) -> None:
        self._criteria = criteria
        self._stop = threading.Event()
        self.ready = threading.Event()
        self.missing = "nothing was checked yet"
        self._thread = threading.Thread(target=self._watch, name="readiness", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                check(self._criteria)
            except NotReady as reason:
                self.missing = str(reason)
                self._stop.wait(POLL_S)
            else:
                self.ready.set()
                return

    def stop(self) -> None:
        """Stop checking, without waiting for a check in progress."""
        self._stop.set()
