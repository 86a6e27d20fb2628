"""A stage that comes back with less KV memory than before, while long jobs run: none of them may
end of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from services.standalone.processes import wait_until_gone
from tests.chaos.faults.fault import Broken, Fault, NotInjected, Simple, hold
from tests.chaos.faults.kill_faults import GONE_S, TAIL, missing, pick
from tests.chaos.faults.postgres_faults import session
from tests.chaos.faults.scale_faults import copies
from tests.chaos.load.requests import MODEL
from tests.chaos.load.users import CLERK
from tests.chaos.stack.local_target import LocalTarget
from tests.polling import within

BACK_S = 120.0
STARTS = 3
"""A stage comes back within so many times what the whole stack took, or BACK_S."""
LEAST_MIB = 1
"""Holds a part of the longest job, in every dtype and split."""
LEASES = 3.0
READY = """
SELECT id, epoch, kv_tokens FROM pipelines
WHERE model = %s AND id NOT LIKE 'copy-%%' AND ready_at IS NOT NULL AND lease_until > now()
"""
"""Of the first model, those of the stack itself."""


def half(target: LocalTarget, rng: random.Random) -> None:
    """Any stage of the first pipeline is killed and finds half of its memory; the next start has
    all of it again."""
    with _less_memory(target, max(1, int(target.kv_mib.read_text()) // 2)):
        _restart(target, *target.pick(rng, f"stage-{rng.randrange(target.num_stages)}"))


def too_little(target: LocalTarget, rng: random.Random) -> None:
    """Beside another pipeline, in which they go on, one becomes too small for its long jobs, and
    whole again."""
    with copies(target, rng, 1):
        with _less_memory(target, LEAST_MIB):
            _restart(target, *pick(target, rng, TAIL))
        if not within(_back_s(target), lambda: 0 < _longest(target) < CLERK.limit):
            raise NotInjected(f"its KV holds {_longest(target)} tokens")
        hold(LEASES * target.times.lease_s)
        _restart(target, *pick(target, rng, TAIL))
        if not within(_back_s(target), lambda: _longest(target) >= CLERK.limit):
            raise Broken("its KV did not become whole again")


@contextmanager
def _less_memory(target: LocalTarget, mib: int) -> Iterator[None]:
    """For every stage that starts meanwhile."""
    whole = target.kv_mib.read_text()
    target.kv_mib.write_text(str(mib))
    try:
        yield
    finally:
        target.kv_mib.write_text(whole)


def _restart(target: LocalTarget, name: str, pid: int) -> None:
    """Until its pipeline is ready in a later epoch: a stage reads its memory seconds after its
    process is there."""
    if not within(_back_s(target), lambda: bool(_ready(target))):
        raise NotInjected("the pipeline is not ready")
    before = _ready(target)
    process = psutil.Process(pid)
    process.kill()
    if not wait_until_gone(process, timeout_s=GONE_S):
        raise NotInjected(f"{name} survived SIGKILL")
    if not within(
        BACK_S,
        lambda: any(
            epoch > before.get(each, (epoch, 0))[0] for each, (epoch, _) in _ready(target).items()
        ),
    ):
        raise NotInjected(f"{name} did not come back within {_back_s(target):.0f} s")


def _ready(target: LocalTarget) -> dict[str, tuple[int, int]]:
    """Epoch and KV in tokens, by pipeline."""
    with session(target) as connection:
        return {
            name: (epoch, tokens) for name, epoch, tokens in connection.execute(READY, (MODEL,))
        }


def _back_s(target: LocalTarget) -> float:
    return max(BACK_S, STARTS * target.start_s)


def _longest(target: LocalTarget) -> int:
    return max((tokens for _, tokens in _ready(target).values()), default=0)


FAULTS: tuple[Fault, ...] = (
    Simple(kind="memory: a stage comes back with half the KV", inject=half, is_kill=True),
    Simple(
        kind="memory: one of two pipelines is too small for a while",
        inject=too_little,
        why_not=lambda target: missing(target, TAIL),
    ),
)
