"""A bad network between the services and their two servers. Whatever speaks through the proxies
suffers from it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from tests.chaos.faults.fault import Fault, Simple, hold
from tests.chaos.network.proxy import Direction, Proxy
from tests.chaos.stack.local_target import LocalTarget

LEASES = 1.5
DELAY_S = 0.1
JITTER_S = 0.05
SLOW_BYTES_PER_S = 20_000

Server = Callable[[LocalTarget], Proxy]
Condition = Callable[[Proxy], None]


def under(server: Server, condition: Condition) -> Callable[[LocalTarget, random.Random], None]:
    """The condition for more than a lease, then fair weather."""

    def inject(target: LocalTarget, rng: random.Random) -> None:
        proxy = server(target)
        try:
            condition(proxy)
            hold(LEASES * target.times.lease_s)
        finally:
            proxy.clear()

    return inject


def cut(server: Server) -> Callable[[LocalTarget, random.Random], None]:
    """Every connection is reset, with whatever was queued in it."""

    def inject(target: LocalTarget, rng: random.Random) -> None:
        server(target).cut()

    return inject


def faults(name: str, server: Server) -> Iterator[Fault]:
    """All conditions on the way to one server."""
    conditions: dict[str, Condition] = {
        "half open": Proxy.half_open,
        "100 ms ± 50": lambda proxy: proxy.delay(DELAY_S, JITTER_S),
        "deaf": lambda proxy: proxy.drop(Direction.TO_SERVER),
        "mute": lambda proxy: proxy.drop(Direction.TO_CLIENT),
        "slow": lambda proxy: proxy.slow(SLOW_BYTES_PER_S),
    }
    for word, condition in conditions.items():
        yield Simple(kind=f"link to {name}: {word}", inject=under(server, condition))
    yield Simple(kind=f"link to {name}: cut", inject=cut(server))


FAULTS: tuple[Fault, ...] = (
    *faults("redis", lambda target: target.redis_proxy),
    *faults("postgres", lambda target: target.database_proxy),
)
