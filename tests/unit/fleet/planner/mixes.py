"""Mixes of devices that are drawn from a seed: speeds, memory, links, dtypes, ranks, disks and
goals, as fleets have them."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

from shardline_costs import DeviceProfile, Goal, Link, ModelCosts, Workload
from tests.unit.fleet.planner.fleets import LAYER_S, device, model

KINDS = ("full_attention", "sliding_attention")


class Mix(NamedTuple):
    """What a plan is made of."""

    model: ModelCosts
    profiles: list[DeviceProfile]
    load: Workload
    goal: Goal


def drawn_mix(seed: int) -> Mix:
    """Returns the mix of this seed: 2 to 12 devices, or 24 to 64 for every tenth."""
    chance = Random(seed)
    num = chance.randint(24, 64) if seed % 10 == 0 else chance.randint(2, 12)
    num_layers = chance.choice([12, 24, 24, 48, 200 if seed % 10 == 0 else 30])
    costs = model(num_layers)
    load = Workload(
        prompt=chance.choice([16, 64, 512]),
        output=chance.choice([16, 64, 128]),
        concurrency=chance.choice([1, 8, 32, 64, 256]),
        at_once=chance.random() < 0.3,
    )
    whole = costs.num_weights * 4 + costs.layers[0].kv_numbers * 4 * num_layers * load.kv_tokens
    kinds = [_kind(chance, whole) for _ in range(chance.choice([1, 2, 3, num]))]
    machines = _machines(chance)
    profiles = [
        way
        for number in range(num)
        for way in _ways(chance, number, kinds, chance.choice(machines))
    ]
    goal = Goal.LATENCY if chance.random() < 0.25 else Goal.THROUGHPUT
    return Mix(costs, profiles, load, goal)


def _kind(chance: Random, whole: float) -> dict[str, Any]:
    """Fields of the devices of one kind; `whole`: the model's bytes and those of its KV."""
    return {
        "hardware": f"kind {chance.random()}",
        "slower": chance.choice([0.2, 0.5, 1.0, 1.0, 1.5, 3.0, 8.0]),
        "tail_s": chance.choice([0.0, 0.5, 2.0, 6.0]) * LAYER_S,
        "tail_prefill_row_s": chance.choice([0.0, -0.3]) * LAYER_S / 64,
        "memory_bytes": int(whole * chance.choice([0.3, 0.45, 0.7, 1.5, 4.0])),
        "stream_bytes_per_s": chance.choice([0.0, 0.0, 0.0, 1e9]),
        "step": ((1, chance.choice([0.0, 0.2]) * LAYER_S),),
    }


def _machines(chance: Random) -> list[dict[str, Any]]:
    """Fields of machines: one without links, or some with near and far ones."""
    if chance.random() < 0.6:
        return [{}]
    names = "wxyz"[: chance.randint(2, 4)]
    far_s = chance.choice([2e-4, 5e-3, 3e-2])
    return [
        {
            "machine": name,
            "host": name,
            "links": {
                other: Link(latency_s=1e-4 if name == other else far_s, bytes_per_s=1e8)
                for other in names
            },
        }
        for name in names
    ]


def _ways(
    chance: Random, number: int, kinds: list[dict[str, Any]], machine: dict[str, Any]
) -> list[DeviceProfile]:
    kind = chance.randrange(len(kinds))
    one = device(f"{kind}:{number}", **{**kinds[kind], **machine})
    dtype = ("float32", "bfloat16")[kind % 4 == 3]
    more = {"ranks": 2, "slower": kinds[kind]["slower"] * 0.6}
    two = device(f"{kind}:{number}", dtype=dtype, **{**kinds[kind], **machine, **more})
    return [one, two] if kind % 3 == 2 else [one]
