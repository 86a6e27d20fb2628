"""Turns of tenants with grammars that are new here, which one process judges for all: a
tenant with slow ones waits for itself. Knows no body."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from services.gateway.turns import TenantTurns
from shardline.contract.job import JobRequest, SamplingParams
from shardline_server.tokenize import RegisteredModel

MAX_KNOWN = 128
"""Digests of requests' grammars: far fewer than the verdicts that are kept."""

MAX_WAIT_S = 10.0
"""Behind one request of each other tenant."""


class GrammarTurns:
    """Lets requests with known grammars pass, and others of a tenant one by one."""

    def __init__(self, *, max_wait_s: float = MAX_WAIT_S) -> None:
        self._turns = TenantTurns(1, "requests with new grammars", max_wait_s=max_wait_s)
        self._known: OrderedDict[bytes, None] = OrderedDict()

    @asynccontextmanager
    async def take(self, model: RegisteredModel, job: JobRequest) -> AsyncIterator[None]:
        """Wait for the turn to prepare a job, if it needs one. Raises Overload."""
        params = job.params()
        digest = _digest(model, params) if has_grammar(params) else None
        if digest is None or digest in self._known:
            yield
            return
        async with self._turns.take(job.tenant):
            yield
        self._known[digest] = None
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)


def has_grammar(params: SamplingParams) -> bool:
    """Whether preparing a job of these parameters may judge a grammar, which takes up to a
    second."""
    return params.structured_outputs is not None or bool(params.tools)


def _digest(model: RegisteredModel, params: SamplingParams) -> bytes:
    asked = (params.structured_outputs, params.tools, params.tool_choice)
    return hashlib.sha256(msgspec.json.encode((model.fingerprint, *asked))).digest()
