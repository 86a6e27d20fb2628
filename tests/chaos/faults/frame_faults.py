"""Frames that a network loses, or brings again in a later epoch. ZeroMQ and TCP hide both almost
always: the rules behind them are for the rest. Only where hops are open: CURVE would let none of it
through. Knows our frames; the links are `hop_net`'s.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.stage.hop.frame import Frame, Kind, decode
from shardline.base.errors import ProtocolError
from shardline_scheduler.step_plan import StepResult, decode_result
from tests.chaos.faults.fault import Fault, NotInjected, Simple, hold
from tests.chaos.faults.network_faults import no_links
from tests.chaos.network.zmtp import PassOn, Tap
from tests.chaos.stack.local_target import LocalTarget

WAIT_S = 20.0
EPOCH_S = 1.0
"""Steps of one epoch to remember."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The tail's answer to one step, as it went over the wire."""

    epoch: int
    result: StepResult
    raw: bytes


class Answers:
    """What passes through all proxies of a stack; each has a thread of its own."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._kept: list[Answer] = []
        self.num_struck = 0

    def pass_on(self, raw: bytes, parts: list[bytes]) -> bytes:
        """A message of any link."""
        frame = _frame(parts)
        if frame is None or frame.kind is not Kind.RESULT:
            return raw
        answer = Answer(epoch=frame.epoch, result=decode_result(frame.message), raw=raw)
        with self._changed:
            passed = self._instead(answer)
            self._kept.append(answer)
            self.num_struck += passed != raw
            self._changed.notify_all()
        return passed

    def wait_for_epoch(self, after: int) -> int:
        """A later one in which answers pass."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._newest() > after, WAIT_S):
                raise NotInjected(f"no answer of an epoch after {after} within {WAIT_S:.0f} s")
            return self._newest()

    def wait_for_strike(self) -> None:
        """Until a frame was lost or came again."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.num_struck > 0, WAIT_S):
                raise NotInjected(f"no frame that fits within {WAIT_S:.0f} s")

    def _newest(self) -> int:
        return max((answer.epoch for answer in self._kept), default=-1)

    def _instead(self, answer: Answer) -> bytes:
        raise NotImplementedError


class Repeated(Answers):
    """Just before an answer comes one of an older epoch to the same step, with as many other
    tokens."""

    def _instead(self, answer: Answer) -> bytes:
        old = next((kept for kept in self._kept if _could_be_taken_for(kept, answer)), None)
        return answer.raw if old is None else old.raw + answer.raw


class Lost(Answers):
    """One answer never comes, soon after another one with as many tokens."""

    def _instead(self, answer: Answer) -> bytes:
        before = self._kept[-1] if self._kept else None
        fits = before is not None and len(before.result.tokens) == len(answer.result.tokens) > 0
        return b"" if fits and self.num_struck == 0 else answer.raw


def come_again(target: LocalTarget, rng: random.Random) -> None:
    """Two epochs, one right after the other; frames of the first come again in the second."""
    repeated = Repeated()
    with _tapped(target, repeated.pass_on):
        epoch = _next_epoch(target, repeated, -1)
        hold(EPOCH_S)
        _next_epoch(target, repeated, epoch)
        repeated.wait_for_strike()
        hold(EPOCH_S)


def are_lost(target: LocalTarget, rng: random.Random) -> None:
    """One frame, on links that stay."""
    lost = Lost()
    with _tapped(target, lost.pass_on):
        _next_epoch(target, lost, -1)
        lost.wait_for_strike()
        hold(EPOCH_S)


@contextmanager
def _tapped(target: LocalTarget, pass_on: PassOn) -> Iterator[None]:
    """Links that are opened meanwhile are read, until they close."""
    is_over = threading.Event()

    def unless_over(raw: bytes, parts: list[bytes]) -> bytes:
        return raw if is_over.is_set() else pass_on(raw, parts)

    for proxy in target.hop_net.proxies.values():
        proxy.tap = lambda: Tap(unless_over)
    try:
        yield
    finally:
        is_over.set()
        for proxy in target.hop_net.proxies.values():
            proxy.tap = None


def _next_epoch(target: LocalTarget, answers: Answers, after: int) -> int:
    for proxy in target.hop_net.links():
        proxy.cut()
    return answers.wait_for_epoch(after)


def _frame(parts: list[bytes]) -> Frame | None:
    """None for what is no frame, such as words on a control link."""
    try:
        return decode(parts)
    except ProtocolError:
        return None


def _could_be_taken_for(old: Answer, new: Answer) -> bool:
    one = old.result
    other = new.result
    return (
        old.epoch < new.epoch
        and one.step == other.step
        and len(one.tokens) == len(other.tokens)
        and one.tokens != other.tokens
    )


def not_readable(target: LocalTarget) -> str | None:
    """CURVE hides frames from whoever is in between, and refuses those that come again."""
    return no_links(target) or (
        None if target.hop_net.is_open else "hops are encrypted: INSECURE=yes"
    )


FAULTS: tuple[Fault, ...] = (
    Simple(kind="frames: of an older epoch come again", inject=come_again, why_not=not_readable),
    Simple(kind="frames: one is lost", inject=are_lost, why_not=not_readable),
)
