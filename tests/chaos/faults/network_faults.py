"""A bad network between the stages: on hops, which carry steps, and on control links, which carry
signs of life."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping

from tests.chaos.faults.fault import Fault, NotInjected, Simple, hold
from tests.chaos.network.proxy import Direction, Proxy
from tests.chaos.stack.local_target import LocalTarget

LINK_DEADS = 1.5
"""Longer than it takes to call a link dead."""
LOOK_S = 0.02
DELAY_S = 0.1
JITTER_S = 0.05
SLOW_BYTES_PER_S = 20_000

Condition = Callable[[Proxy], None]
Inject = Callable[[LocalTarget, random.Random], None]


def no_links(target: LocalTarget) -> str | None:
    """A pipeline of one stage has no hop."""
    return None if target.num_stages > 1 else "a pipeline of one stage has no links"


def everywhere(condition: Condition) -> Inject:
    """On every link between stages, and on those that they open meanwhile."""

    def inject(target: LocalTarget, rng: random.Random) -> None:
        _need_links(target)
        try:
            for proxy in target.hop_net.proxies.values():
                condition(proxy)
            hold(LINK_DEADS * target.times.link_dead_s)
        finally:
            target.hop_net.clear()

    return inject


def half_open(target: LocalTarget, rng: random.Random) -> None:
    """One stage's machine is gone for everybody who calls it, without a word."""
    _hurt(target, {target.pick(rng, "stage-")[1]: Proxy.half_open})


def from_head(target: LocalTarget, rng: random.Random) -> None:
    """One way: what the head says to a later stage is lost, the answers are not."""
    (_, head), (_, later) = target.pick(rng, "stage-0"), target.pick(rng, _later(target, rng))
    _hurt(target, {later: _deaf, head: _mute})


def to_head(target: LocalTarget, rng: random.Random) -> None:
    """The other way."""
    (_, head), (_, later) = target.pick(rng, "stage-0"), target.pick(rng, _later(target, rng))
    _hurt(target, {head: _deaf, later: _mute})


def cut_with_frames(target: LocalTarget, rng: random.Random) -> None:
    """Frames are held back until there are some, then their connections break with them inside."""
    _need_links(target)
    try:
        for proxy in target.hop_net.links():
            proxy.drop(rng.choice(tuple(Direction)))
        hold(target.times.link_dead_s / 4)
        for proxy in target.hop_net.links():
            proxy.cut()
    finally:
        target.hop_net.clear()


def cut_one(target: LocalTarget, rng: random.Random) -> None:
    """One connection, control link or hop, is reset."""
    _need_links(target)
    rng.choice(target.hop_net.links()).cut()


def _need_links(target: LocalTarget) -> None:
    """A pipeline that is forming anew after the fault before may have none for a moment."""
    until_s = time.monotonic() + target.times.recover_s
    while not target.hop_net.links():
        if time.monotonic() > until_s:
            raise NotInjected("no stage is connected to another")
        hold(LOOK_S)


def _later(target: LocalTarget, rng: random.Random) -> str:
    return f"stage-{rng.randrange(1, target.num_stages)}"


def _hurt(target: LocalTarget, conditions: Mapping[int, Condition]) -> None:
    """On the links by which these processes are called; they may open others meanwhile, for a new
    epoch."""
    _need_links(target)
    until_s = time.monotonic() + LINK_DEADS * target.times.link_dead_s
    hurt: set[Proxy] = set()
    try:
        while time.monotonic() < until_s:
            for pid, condition in conditions.items():
                for proxy in set(target.hop_net.to(pid)) - hurt:
                    condition(proxy)
                    hurt.add(proxy)
            hold(LOOK_S)
    finally:
        target.hop_net.clear()
    if not hurt:
        raise NotInjected("nobody could call these stages")


def _deaf(proxy: Proxy) -> None:
    """The one who is called hears nothing, but is heard."""
    proxy.drop(Direction.TO_SERVER)


def _mute(proxy: Proxy) -> None:
    """The one who is called hears, but is not heard."""
    proxy.drop(Direction.TO_CLIENT)


def _faults() -> Iterator[Fault]:
    injections: dict[str, Inject] = {
        "half open": half_open,
        "100 ms ± 50": everywhere(lambda proxy: proxy.delay(DELAY_S, JITTER_S)),
        "slow reader": everywhere(lambda proxy: proxy.slow(SLOW_BYTES_PER_S)),
        "one way, from the head": from_head,
        "one way, to the head": to_head,
        "cut with frames queued": cut_with_frames,
        "one connection cut": cut_one,
    }
    for word, inject in injections.items():
        yield Simple(kind=f"network: {word}", inject=inject, why_not=no_links)


FAULTS: tuple[Fault, ...] = tuple(_faults())
