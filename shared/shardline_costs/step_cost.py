"""What a stage costs: seconds of all steps and bytes of memory for layers [a, b) of a model on one
device.

Knows no search.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardline.base.errors import Invalid
from shardline.contract.fleet.stage_memory import NUM_BUFFERS, PACKING_FACTOR
from shardline_costs.device_profile import DeviceProfile, interpolated
from shardline_costs.model_costs import (
    EMBEDDING_BYTES,
    KV_BYTES,
    ModelCosts,
)
from shardline_costs.workload import StepKind

ACTIVATION_COPIES = 8
"""Of a step's hidden states that live at the same time, at most: input, output, and the wide inner
ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """Describes a device that reads the weights that its memory does not hold in every step."""

    kv_bytes: tuple[float, ...]
    """Of the layers before each layer: memory holds them in any case."""
    buffer_bytes: float
    """Of memory, into which weights are read."""
    byte_s: float
    """To read a byte in all steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Sums over layers as prefixes: any range is a difference of two, so that a search may ask for
    all of them."""

    seconds: tuple[float, ...]
    """Of the layers before each layer, in all steps."""
    stage_s: float
    """Of a stage, whatever its layers: its steps and its frames."""
    tail_s: float
    """More, if it is the last; may be below 0."""
    bytes: tuple[float, ...]
    """Of the layers before each layer: weights and KV."""
    least_s: float
    """Of any layer, in all steps."""
    least_bytes: float
    head_bytes: float
    tail_bytes: float
    memory_bytes: float
    """What there is, less activations."""
    streaming: Streaming | None = None
    """None: memory must hold all weights."""
    joined_from: int | None = None
    """The layer from which on all must be in one stage."""

    @property
    def num_layers(self) -> int:
        """Returns the number of layers of the model."""
        return len(self.seconds) - 1

    def stage(self, first: int, stop: int) -> float:
        """Seconds of a stage with layers [first, stop); more layers never cost less."""
        layers_s = self.seconds[stop] - self.seconds[first]
        computing_s = self.stage_s + layers_s + (self.tail_s if stop == self.num_layers else 0.0)
        reading_s = self.streaming.byte_s * self.streamed(first, stop) if self.streaming else 0.0
        return max(0.0, computing_s, reading_s)

    def fits(self, first: int, stop: int) -> bool:
        """Whether the device's memory holds these layers, or what of them it must, and they may be
        split from the others."""
        if self._is_cut_at(first) or self._is_cut_at(stop):
            return False
        room = self.room(first, stop)
        if room >= 0 or self.streaming is None:
            return room >= 0
        kv_bytes = self.streaming.kv_bytes[stop] - self.streaming.kv_bytes[first]
        return self.memory_bytes - kv_bytes - self.streaming.buffer_bytes >= self._ends_bytes(
            first, stop
        )

    def holds(self, first: int, stop: int, limit: float) -> bool:
        """Whether a stage with these layers fits and takes less than `limit` seconds."""
        return self.stage(first, stop) < limit and self.fits(first, stop)

    def reach(self, first: int, end: int, limit: float) -> int:
        """The furthest layer, `end` at most, up to which a stage fits and is below the limit;
        `first` if none is."""
        last = bisect_right(self.seconds, limit - self.stage_s + self.seconds[first]) - 1
        free = (
            self.memory_bytes
            + self.missing(limit)
            + self.bytes[first]
            - (self.head_bytes if first == 0 else 0.0)
        )
        stop = min(end, last, bisect_right(self.bytes, free) - 1)
        while stop > first and not self.holds(first, stop, limit):
            stop -= 1
        return max(stop, first)

    def most(self, limit: float) -> int:
        """No fewer layers than any stage below `limit` holds, if it is not the last."""
        room_s = limit - self.stage_s
        if room_s <= 0 or self.memory_bytes < 0:
            return 0
        by_memory = (self.memory_bytes + self.missing(limit)) / max(1.0, self.least_bytes)
        # Sums of floats are off by a little. Some kinds of layers may take no time.
        takes_all = room_s >= self.least_s * self.num_layers
        by_time = self.num_layers if takes_all else room_s / self.least_s * (1 + 1e-12)
        return int(min(self.num_layers, by_time, by_memory))

    def tail(self, limit: float) -> int:
        """The first layer from which a last stage fits and is below the limit; the number of layers
        if none is."""
        num = self.num_layers
        free = self.bytes[num] - self.memory_bytes - self.missing(limit) + self.tail_bytes
        by_time = bisect_right(self.seconds, self.stage_s + self.seconds[num] + self.tail_s - limit)
        first = min(num, max(by_time, bisect_left(self.bytes, free)))
        # Sums of floats are off by a little.
        while first < num and not self.holds(first, num, limit):
            first += 1
        while first > 0 and self.holds(first - 1, num, limit):
            first -= 1
        return first

    def room(self, first: int, stop: int) -> float:
        """Bytes that such a stage leaves free; below 0: memory does not hold all of it."""
        return (
            self.memory_bytes
            - (self.bytes[stop] - self.bytes[first])
            - self._ends_bytes(first, stop)
        )

    def streamed(self, first: int, stop: int) -> float:
        """Bytes of weights that such a stage reads in every step."""
        missing = -self.room(first, stop)
        return missing + self.streaming.buffer_bytes if self.streaming and missing > 0 else 0.0

    def missing(self, limit: float) -> float:
        """Bytes that memory may lack so that they are read in less than `limit` seconds."""
        return (
            max(0.0, limit / self.streaming.byte_s - self.streaming.buffer_bytes)
            if self.streaming
            else 0.0
        )

    def _is_cut_at(self, bound: int) -> bool:
        return self.joined_from is not None and self.joined_from < bound < self.num_layers

    def _ends_bytes(self, first: int, stop: int) -> float:
        return (self.head_bytes if first == 0 else 0.0) + (
            self.tail_bytes if stop == self.num_layers else 0.0
        )


def stage_cost(
    profile: DeviceProfile,
    model: ModelCosts,
    steps: Sequence[StepKind],
    kv_tokens: int,
    *,
    sequences: int = 0,
) -> StageCost:
    """The cost of these steps on one device, which holds KV of `kv_tokens` and the states of
    `sequences`. Raises Invalid if the profile does not know a kind of layer."""
    if missing := sorted(set(model.kinds) - set(profile.layers)):
        raise Invalid(
            "--devices",
            f"{profile.device} has no times of {', '.join(missing)}",
            "Measure it with this model",
        )
    weight = model.weight_bytes(profile.dtype)
    kv = KV_BYTES[profile.dtype]
    layers = [kind.name for kind in model.layers]
    seconds = {
        name: sum(step.count * layer_s(profile, name, step) for step in steps)
        for name in model.kinds
    }
    kv_sizes = {
        name: float(kind.kv_numbers * kv * kv_tokens + kind.state_bytes * sequences)
        for name, kind in model.kinds.items()
    }
    sizes = {
        name: kind.num_weights * weight * PACKING_FACTOR + kv_sizes[name]
        for name, kind in model.kinds.items()
    }
    embedding = model.embedding_weights * EMBEDDING_BYTES[profile.dtype] * PACKING_FACTOR
    rows = max(step.rows for step in steps)
    return StageCost(
        seconds=tuple(accumulate(map(seconds.__getitem__, layers), initial=0.0)),
        stage_s=sum(
            step.count * (interpolated(profile.step, step.rows) + frames_s(profile, model, step))
            for step in steps
        ),
        tail_s=sum(step.count * tail_s(profile, step) for step in steps),
        bytes=tuple(accumulate(map(sizes.__getitem__, layers), initial=0.0)),
        least_s=min(seconds.values()),
        least_bytes=min(sizes.values()),
        head_bytes=embedding,
        tail_bytes=embedding,
        memory_bytes=profile.memory_bytes
        - ACTIVATION_COPIES * rows * model.hidden_size * KV_BYTES[profile.dtype],
        streaming=Streaming(
            kv_bytes=tuple(accumulate(map(kv_sizes.__getitem__, layers), initial=0.0)),
            buffer_bytes=NUM_BUFFERS
            * max(kind.num_weights for kind in model.layers)
            * weight
            * PACKING_FACTOR,
            byte_s=sum(step.count for step in steps) / profile.stream_bytes_per_s,
        )
        if profile.stream_bytes_per_s
        else None,
        joined_from=model.joined_from,
    )


def layer_s(profile: DeviceProfile, kind: str, step: StepKind) -> float:
    """Seconds of one layer in one step."""
    return profile.layers[kind].seconds(
        rows=step.rows, decode_context=step.decode_context, prefill_context=step.prefill_context
    )


def compute_s(
    profile: DeviceProfile, kinds: Mapping[str, int], step: StepKind, *, is_tail: bool
) -> float:
    """Returns the seconds in which a stage with these layers of each kind computes one step."""
    layers_s = sum(num * layer_s(profile, kind, step) for kind, num in kinds.items())
    return (
        layers_s
        + interpolated(profile.step, step.rows)
        + (tail_s(profile, step) if is_tail else 0.0)
    )


def frames_s(profile: DeviceProfile, model: ModelCosts, step: StepKind) -> float:
    """Seconds of work that a step's frames make: one comes, one goes."""
    return profile.frame_s + profile.frame_byte_s * frame_bytes(profile, model, step)


def frame_bytes(profile: DeviceProfile, model: ModelCosts, step: StepKind) -> float:
    """Returns the bytes of a step's activations."""
    return step.rows * model.hidden_size * KV_BYTES[profile.dtype]


def tail_s(profile: DeviceProfile, step: StepKind) -> float:
    """Seconds that the tail adds: output layer and sampler, less what its last layer leaves out of
    prompts."""
    sampled = interpolated(profile.sampled, step.decodes) if step.decodes else 0.0
    is_narrowed = step.prefill >= step.decodes
    return sampled + (profile.tail_prefill_row_s * step.prefill if is_narrowed else 0.0)
