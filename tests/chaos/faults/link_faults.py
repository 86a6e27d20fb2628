"""A bad network between the services and their two servers. Whatever speaks through the proxies suffers from it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from tests.chaos.faults.fault import Fault, Simple, hold
from tests.chaos.network.proxy import Direction, Proxy
from tests.chaos.stack.world import World

LEASES = 1.5
DELAY_S, JITTER_S = 0.1, 0.05
SLOW_BYTES_PER_S = 20_000

Server = Callable[[World], Proxy]
Condition = Callable[[Proxy], None]


def under(server: Server, condition: Condition) -> Callable[[World, random.Random], None]:
    """The condition for more than a lease, then fair weather."""

    def inject(world: World, rng: random.Random) -> None:
        proxy = server(world)
        try:
            condition(proxy)
            hold(LEASES * world.times.lease_s)
        finally:
            proxy.clear()

    return inject


def cut(server: Server) -> Callable[[World, random.Random], None]:
    """Every connection is reset, with whatever was queued in it."""

    def inject(world: World, rng: random.Random) -> None:
        server(world).cut()

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
    *faults("redis", lambda world: world.redis_proxy),
    *faults("postgres", lambda world: world.database_proxy),
)
