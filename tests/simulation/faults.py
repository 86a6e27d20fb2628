"""What strikes the machines of one seed, and what it says of itself. Knows no invariant."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.machines import TIMES, HeadMachine, StageMachine

if TYPE_CHECKING:
    from tests.simulation.world import World

HANG_S = 2 * TIMES.stall_s

Strike = Callable[["World"], str]


def kill(world: World) -> str:
    """SIGKILL; a supervisor starts it again."""
    victim = world.victim()
    victim.process.kill()
    return f"kill {victim.name}"


def pause(world: World) -> str:
    """SIGSTOP for half a lease to three of them."""
    victim = world.victim()
    process = victim.process
    pause_s = TIMES.lease_s * world.rng.choice([0.5, 1.5, 3.0])
    process.pause()
    world.lasts(pause_s)
    world.loom.after(pause_s, process.resume)
    return f"pause {victim.name} {pause_s} s"


def hang(world: World) -> str:
    """A stage's next step takes longer than any patience."""
    victim = world.victim()
    if isinstance(victim, StageMachine) and victim.toy is not None:
        victim.toy.hang_s = HANG_S
        world.lasts(HANG_S)
    return f"hang {victim.name}"


def drain(world: World) -> str:
    """SIGTERM of a head."""
    heads = [
        machine
        for machine in world.machines
        if isinstance(machine, HeadMachine) and machine.process.is_alive
    ]
    if heads:
        world.rng.choice(heads).drain()
    return f"drain {len(heads)}"


def forget(world: World) -> str:
    """FLUSHALL."""
    world.site.redis.forget()
    return "Redis forgets"


def close_redis(world: World) -> str:
    """Redis is away, and comes back empty or not."""
    redis = world.site.redis
    redis.is_up = False
    if world.rng.random() < 0.5:
        redis.forget()
    world.loom.after(world.rng.uniform(0.5, 6.0), lambda: setattr(redis, "is_up", True))
    return "Redis is away"


def close_postgres(world: World) -> str:
    """Postgres is away for less or more than a lease."""
    world.site.postgres.is_up = False
    world.loom.after(world.rng.uniform(0.2, 1.5 * TIMES.lease_s), world.site.postgres.restart)
    return "Postgres is away"


def cut(world: World) -> str:
    """A connection breaks with frames queued."""
    living = [connection for connection in world.site.network.connections if connection.is_open]
    if living:
        world.rng.choice(living).cut()
    return f"cut 1 of {len(living)} connections"


def lock(world: World) -> str:
    """A tenant's transaction has changed some of its jobs and stays open for less or more than a
    lease."""
    jobs = [job.id for job in world.tables.jobs.values() if not job.state.terminal]
    locked = set(world.rng.sample(sorted(jobs), min(len(jobs), world.rng.randint(1, 3))))
    locked -= world.tables.locked
    lock_s = world.rng.uniform(0.1, 2.0 * TIMES.lease_s)
    world.tables.locked |= locked
    world.lasts(lock_s)
    world.loom.after(lock_s, partial(world.tables.locked.difference_update, locked))
    return f"{len(locked)} rows are locked for {lock_s:.1f} s"


def skew(world: World) -> str:
    """The wall clock of a process jumps."""
    victim = world.victim()
    victim.process.skew_s = world.rng.uniform(-30.0, 30.0)
    return f"clock of {victim.name} {victim.process.skew_s:+.1f} s"


FAULTS: tuple[Strike, ...] = (
    kill,
    kill,
    kill,
    pause,
    pause,
    hang,
    drain,
    forget,
    close_redis,
    close_postgres,
    cut,
    cut,
    lock,
    lock,
    skew,
)
