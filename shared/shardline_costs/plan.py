"""Plans as records: pipelines of stages with what is predicted of them. Knows no search and no
terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from shardline_costs.workload import Goal


class DeviceName(msgspec.Struct, frozen=True):
    """A device of a fleet."""

    host: str
    device: str
    """As SHARDLINE_DEVICE names it."""


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One stage, and what is predicted of it."""

    devices: tuple[DeviceName, ...]
    """One for each replica."""
    dtype: str
    ranks: int = 1
    """As SHARDLINE_TP has them."""
    first: int
    stop: int
    """Its layers are [first, stop)."""
    busy_s: float
    """In all steps of the load."""
    busy_share: float
    weight_bytes: int
    streamed_bytes: int = 0
    """The part of them that its memory does not hold: read in every step."""
    kv_tokens: int
    """That its memory holds next to its weights."""

    @property
    def layers(self) -> str:
        """Returns the layers as SHARDLINE_LAYERS writes them."""
        return f"{self.first}-{self.stop - 1}"


class PipelinePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Stages in order, the same in each replica, with what their share of the load would see of all
    replicas."""

    stages: tuple[StagePlan, ...]
    replicas: int
    concurrency: int
    """Requests that each replica runs at a time."""
    tokens_per_s: float
    """Output tokens of all replicas."""
    ttft_s: float
    """To the first token of a request alone."""
    token_s: float
    """From one token to the next of a request alone."""
    request_s: float
    """A request alone, from its prompt to its last token."""
    kv_tokens: int
    """That all replicas hold."""
    bottleneck: int
    """Place of the busiest stage."""

    @property
    def split(self) -> str:
        """Returns the split as SHARDLINE_SPLIT writes it."""
        return ",".join(stage.layers for stage in self.stages)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Pipelines side by side, which take their requests from one queue."""

    pipelines: tuple[PipelinePlan, ...]
    tokens_per_s: float
    """Output tokens of all."""
    ttft_s: float
    """To the first token of a request alone, on the pipeline where such a request ends first."""
    token_s: float
    """From one token to the next, there."""
    request_s: float
    """A request alone, from its prompt to its last token, there."""
    kv_tokens: int
    """That all hold."""

    @classmethod
    def of(cls, pipelines: Iterable[PipelinePlan], concurrency: int) -> Plan:
        """Sums up pipelines that share this many requests. Their shares are rounded up: what that
        adds up to in excess does not count."""
        found = tuple(pipelines)
        num_shared = sum(each.concurrency * each.replicas for each in found)
        alone = min(found, key=lambda each: each.request_s)
        return cls(
            pipelines=found,
            tokens_per_s=sum(each.tokens_per_s for each in found)
            * min(1.0, concurrency / num_shared),
            ttft_s=alone.ttft_s,
            token_s=alone.token_s,
            request_s=alone.request_s,
            kv_tokens=sum(each.kv_tokens for each in found),
        )

    @property
    def replicas(self) -> int:
        """Copies of the model: those of all pipelines."""
        return sum(each.replicas for each in self.pipelines)

    @property
    def split(self) -> str:
        """Returns the split of each pipeline, as SHARDLINE_SPLIT writes it."""
        return " + ".join(each.split for each in self.pipelines)

    @property
    def devices(self) -> list[DeviceName]:
        """All that it uses."""
        return [name for each in self.pipelines for stage in each.stages for name in stage.devices]

    def cost_per_million(self, hour_costs: Mapping[str, float]) -> float:
        """Money for a million output tokens under the whole load, by what an hour of each device
        costs, busy or not."""
        per_hour = sum(hour_costs[name.device] for name in self.devices)
        return per_hour / 3600 / self.tokens_per_s * 1e6

    def seconds(self, goal: Goal) -> float:
        """What the goal makes as small as can be: of an output token of the whole load, or of a
        request alone."""
        return self.request_s if goal is Goal.LATENCY else 1 / self.tokens_per_s


class Plans(msgspec.Struct, frozen=True, kw_only=True):
    """The best plan, those that come next, and even splits of as many stages for comparison."""

    goal: Goal
    best: Plan
    others: tuple[Plan, ...]
    even: Plan | None
    """None if it does not fit on the devices in the order in which they were given."""

    def cost(self, other: Plan) -> float:
        """How many times the best plan's time another one takes."""
        return other.seconds(self.goal) / self.best.seconds(self.goal)
