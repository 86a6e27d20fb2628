"""The choices of one request: each is a request, and becomes a separate job. Knows no door and no
row."""

from __future__ import annotations

import hashlib
from typing import Annotated, TypeVar

from msgspec import Meta
from msgspec.structs import replace

from shardline.base.errors import Invalid
from shardline.contract.ids import new_id
from shardline.contract.job import MAX_SEED, JobRequest

MAX_N = 128
MAX_CHOICES = 512
"""Of one request: its prompts times `n`. They are stored in one transaction, and answered as
one."""

NumChoices = Annotated[int, Meta(ge=1, le=MAX_N)]

RequestT = TypeVar("RequestT", bound=JobRequest)


def check_n(n: object) -> None:
    """Raises Invalid for a number of choices that no request may have."""
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_N:
        raise Invalid("n", f"{n!r} is no number from 1 to {MAX_N}", "Pass another one")


def choices_of(request: RequestT, n: int) -> tuple[RequestT, ...]:
    """Returns `n` requests of the same, the first as it is. The others have new ids, no
    key, and where the request has a seed one that follows from it: they differ, and a repeat
    draws the same."""
    others = (
        replace(
            request,
            id=new_id(),
            idempotency_key=None,
            seed=None if request.seed is None else choice_seed(request.seed, place),
        )
        for place in range(1, n)
    )
    return (request, *others)


def choice_seed(seed: int, place: int) -> int:
    """Returns the seed of choice `place` of a request with this seed, which the first one keeps."""
    if place == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & MAX_SEED
