"""What is predicted of a pipeline: its speed, latency and room for KV under a load. Knows no
search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import floor
from typing import NamedTuple

from shardline.base.errors import Invalid
from shardline.contract.fleet.lanes import lanes_for
from shardline_costs.device_profile import DeviceProfile, Link
from shardline_costs.model_costs import (
    EMBEDDING_BYTES,
    KV_BYTES,
    ModelCosts,
)
from shardline_costs.plan import DeviceName, PipelinePlan, StagePlan
from shardline_costs.step_cost import (
    StageCost,
    compute_s,
    frame_bytes,
    frames_s,
    stage_cost,
    tail_s,
)
from shardline_costs.workload import StepKind, Workload

MIB = 1 << 20


class StageAssignment(NamedTuple):
    """A stage: one device for each replica, all alike, and its layers [first, stop)."""

    devices: tuple[DeviceProfile, ...]
    first: int
    stop: int

    @property
    def profile(self) -> DeviceProfile:
        """Returns the profile of the first replica's device: those of the others are taken for
        equal."""
        return self.devices[0]

    def link(self, other: StageAssignment) -> Link:
        """The slowest to another stage: a head takes whatever device is free, of any replica."""
        links = (
            {one.machine: one for one in self.devices},
            {one.machine: one for one in other.devices},
        )
        return max(
            (one.link(two) for one, two in product(*(of.values() for of in links))), key=_slowness
        )


def _slowness(link: Link) -> float:
    return link.seconds(MIB)


@dataclass(frozen=True, slots=True)
class Predictor:
    """A model under the load of one replica."""

    model: ModelCosts
    load: Workload
    _costs: dict[tuple[str, str, tuple[str, int], int], StageCost] = field(
        default_factory=dict, repr=False, compare=False
    )
    """Those asked for before: a search and its neighbors ask for the same ones."""

    def cost(self, profile: DeviceProfile, num_stages: int) -> StageCost:
        """Returns the cost of any range of layers on a device, in a pipeline of `num_stages`
        stages."""
        key = profile.host, profile.device, profile.way, num_stages
        if key not in self._costs:
            load = self.load
            self._costs[key] = stage_cost(
                profile,
                self.model,
                load.steps(num_stages),
                load.kv_tokens,
                sequences=load.concurrency,
            )
        return self._costs[key]

    def fits(self, stages: Sequence[StageAssignment]) -> bool:
        """Whether weights and the KV of the load find room on each device."""
        return all(
            self.cost(each.profile, len(stages)).fits(each.first, each.stop) for each in stages
        )

    def busy_s(self, tokens_per_s: float) -> float:
        """A stage that is busy for longer under the load is in no replica that is as fast as
        this."""
        return (
            self.load.concurrency * self.load.output / tokens_per_s
            if tokens_per_s
            else float("inf")
        )

    def predict(self, stages: Sequence[StageAssignment]) -> PipelinePlan:
        """The plan of these stages, which must cover all layers in order. Raises Invalid if they
        take no time."""
        load = self.load
        replicas = len(stages[0].devices)
        num_lanes = self.num_lanes(stages)
        steps = load.steps(num_lanes)
        times = [[self._step_s(stage, step, len(stages)) for step in steps] for stage in stages]
        total_s = sum(
            step.count * self._interval_s(stages, step, of_step, num_lanes)
            for step, of_step in zip(steps, zip(*times, strict=True), strict=True)
        )
        if total_s <= 0:
            names = ", ".join(stage.profile.device for stage in stages)
            raise Invalid("--devices", f"steps on {names} take no time", "Measure them again")
        busy = [
            sum(step.count * seconds for step, seconds in zip(steps, row, strict=True))
            for row in times
        ]
        ttft_s = self._first_token_s(stages)
        token_s = self._next_token_s(stages)
        planned = tuple(
            self._stage(stage, busy_s, total_s, len(stages))
            for stage, busy_s in zip(stages, busy, strict=True)
        )
        return PipelinePlan(
            stages=planned,
            replicas=replicas,
            concurrency=load.concurrency,
            tokens_per_s=load.concurrency * load.output * replicas / total_s,
            ttft_s=ttft_s,
            token_s=token_s,
            request_s=ttft_s + (load.output - 1) * token_s,
            kv_tokens=min(stage.kv_tokens for stage in planned) * replicas,
            bottleneck=busy.index(max(busy)),
        )

    def num_lanes(self, stages: Sequence[StageAssignment]) -> int:
        """Returns the number of lanes that the head of these stages would choose, by its farthest
        stage and what the slowest takes."""
        latency_s = max((stages[0].link(stage).latency_s for stage in stages[1:]), default=0.0)
        if latency_s == 0:
            return len(stages)
        steps = self.load.steps(len(stages))
        busy_s = sum(
            step.count * max(self._step_s(stage, step, len(stages)) for stage in stages)
            for step in steps
        )
        return lanes_for(len(stages), 2 * latency_s, busy_s / sum(step.count for step in steps))

    def _step_s(self, stage: StageAssignment, step: StepKind, num_stages: int) -> float:
        """Returns the seconds of a stage, of `num_stages`, in one step: streamed weights are read
        while others compute."""
        kinds = Counter(kind.name for kind in self.model.layers[stage.first : stage.stop])
        is_tail = stage.stop == len(self.model.layers)
        computing_s = compute_s(stage.profile, kinds, step, is_tail=is_tail)
        streamed = self.cost(stage.profile, num_stages).streamed(stage.first, stage.stop)
        reading_s = streamed / stage.profile.stream_bytes_per_s if streamed else 0.0
        return max(computing_s, reading_s) + frames_s(stage.profile, self.model, step)

    def _interval_s(
        self,
        stages: Sequence[StageAssignment],
        step: StepKind,
        times: Sequence[float],
        num_lanes: int,
    ) -> float:
        """Seconds from one step to the next. It is as slow as its slowest stage or link, for which
        the others wait; and as many steps as there are lanes share a whole round."""
        if len(stages) == 1:
            return times[0]
        on_links_s = [size / link.bytes_per_s for link, size in self._frames(stages, step)]
        return max(*times, *on_links_s, (sum(times) + self._hops_s(stages, step)) / num_lanes)

    def _hops_s(self, stages: Sequence[StageAssignment], step: StepKind) -> float:
        """Seconds of a round in which the step's frames are between stages."""
        return sum(link.seconds(size) for link, size in self._frames(stages, step))

    def _frames(
        self, stages: Sequence[StageAssignment], step: StepKind
    ) -> Iterator[tuple[Link, float]]:
        """Yields the link and the bytes of each frame of a step; the tail's, with tokens alone,
        goes to the head."""
        if len(stages) > 1:
            for one, other in pairwise(stages):
                yield one.link(other), frame_bytes(one.profile, self.model, step)
            yield stages[-1].link(stages[0]), 0.0

    def _first_token_s(self, stages: Sequence[StageAssignment]) -> float:
        """Chunks follow each other through the pipeline: the last one leaves when the slowest stage
        has done all."""
        chunk = self.load.first_token()[0]
        times = [self._step_s(stage, chunk, len(stages)) for stage in stages]
        behind_s = max(0.0, chunk.count - 1) * self._interval_s(
            stages, chunk, times, self.num_lanes(stages)
        )
        sampled = StepKind(count=1, decodes=1, decode_context=self.load.prompt)
        return (
            sum(times)
            + self._hops_s(stages, chunk)
            + behind_s
            + tail_s(stages[-1].profile, sampled)
        )

    def _next_token_s(self, stages: Sequence[StageAssignment]) -> float:
        step = StepKind(count=1, decodes=1, decode_context=self.load.prompt + self.load.output / 2)
        return sum(self._step_s(stage, step, len(stages)) for stage in stages) + self._hops_s(
            stages, step
        )

    def _stage(
        self, stage: StageAssignment, busy_s: float, total_s: float, num_stages: int
    ) -> StagePlan:
        profile = stage.profile
        layers = self.model.layers[stage.first : stage.stop]
        num_ends = (stage.first == 0) + (stage.stop == len(self.model.layers))
        num_weights = sum(kind.num_weights for kind in layers)
        layer_bytes = num_weights * self.model.weight_bytes(profile.dtype)
        end_bytes = num_ends * self.model.embedding_weights * EMBEDDING_BYTES[profile.dtype]
        kv_bytes = sum(kind.kv_numbers for kind in layers) * KV_BYTES[profile.dtype]
        cost = self.cost(profile, num_stages)
        return StagePlan(
            devices=tuple(DeviceName(each.host, each.device) for each in stage.devices),
            dtype=profile.dtype,
            ranks=profile.ranks,
            first=stage.first,
            stop=stage.stop,
            busy_s=busy_s,
            busy_share=busy_s / total_s,
            weight_bytes=round(layer_bytes + end_bytes),
            streamed_bytes=round(cost.streamed(stage.first, stage.stop)),
            kv_tokens=self.load.kv_tokens
            + floor(max(0.0, cost.room(stage.first, stage.stop)) / max(1, kv_bytes)),
        )
