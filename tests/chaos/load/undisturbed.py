"""The undisturbed pass: what comes of each request of the set while nobody dies. Knows no fault and
no judgment."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from uuid import uuid4

import msgspec

from shardline.client import Client
from shardline.contract.job import Result
from tests.chaos.load.journal import Asked
from tests.chaos.load.target import Target

UNDISTURBED_S = 600.0
"""On two cores that others use too."""


class Compared(StrEnum):
    """What of a job must be the same as undisturbed."""

    BITS = "tokens, text and log-probabilities"
    TOKENS = "tokens and text"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What comes of one request."""

    tokens: Sequence[int]
    text: str | None = None
    """None: unknown, as is the next."""
    logprobs: Sequence[Any] | None = None
    decision: Sequence[Any] | None = None
    """The numbers of a question's answer, in the order of `Decision`; None: unknown, or it is
    none."""
    vector: Sequence[float] | None = None
    """Of a text, in float32, or the score of a pair; None: unknown, or there is none."""
    adapter: str | None = None
    """The fingerprint in its provenance; None: it had none."""


def undisturbed(target: Target, compared: Compared = Compared.BITS) -> list[Expected] | None:
    """What comes of every request of the set while nobody dies; None where a resume may give other
    tokens."""
    asked = [
        Asked(id=uuid4(), number=n, door="calm", promised=True)
        for n in range(len(target.workload.requests))
    ]
    for each in asked:
        target.journal.ask(each)
    documents = [
        {**target.workload.dressed(each.number, each.dress), "id": each.id} for each in asked
    ]
    with Client(database_url=target.urls["database"], redis_url=target.urls["redis"]) as client:
        client.submit_many(documents)
        jobs = client.wait([each.id for each in asked], timeout_s=UNDISTURBED_S)
    found = []
    for job in jobs:
        result = job.result
        assert result is not None
        has_bits = compared is Compared.BITS
        assert result.exact or not has_bits, (
            "without exact rows a changed token proves nothing: no kernel?"
        )
        # As JSON, which is how rows and streams have it.
        logprobs = msgspec.json.decode(msgspec.json.encode(result.logprobs)) if has_bits else None
        decision = None
        if has_bits and result.decision is not None:
            numbers = msgspec.structs.astuple(result.decision)
            decision = msgspec.json.decode(msgspec.json.encode(numbers))
        adapter = result.provenance.get("adapter", {}).get("fingerprint")
        found.append(
            Expected(
                tokens=result.token_ids,
                text=result.text,
                logprobs=logprobs,
                decision=decision,
                vector=_vector(result) if has_bits else None,
                adapter=adapter,
            )
        )
    return None if compared is Compared.NOTHING else found


def _vector(result: Result) -> Sequence[float] | None:
    if result.embedding is not None:
        return tuple(array("f", result.embedding))
    return (result.score,) if result.decision is None and result.score is not None else None
