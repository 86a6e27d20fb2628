"""What a worker measured of its device: the times of a model's parts, as a record that travels as JSON.

Times are of the model's own layers through the stage's own code, so that one number holds all that a layer costs:
products, norms, calls. `python -m services.stage profile` writes it. Knows no plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Annotated

import msgspec

from shardline.errors import Invalid

VERSION = 3
BUSY_SHARE = 0.1
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Points = Annotated[tuple[tuple[float, float], ...], msgspec.Meta(min_length=1, max_length=64)]
"""(rows, seconds), by rows."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What frames between two machines meet, while no stage works for them."""

    latency_s: Seconds
    bytes_per_s: Annotated[float, msgspec.Meta(gt=0)]

    def seconds(self, num_bytes: float) -> float:
        """From the end of a frame's sending to its arrival."""
        return self.latency_s + num_bytes / self.bytes_per_s


NO_LINK = Link(latency_s=0.0, bytes_per_s=1e9)
"""Stands for what nobody has measured."""


class LayerTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One layer of one kind."""

    rows: Points
    """Without any context: products and all that a row costs."""
    decode_context_s: Seconds
    """For each token of context of each decode row."""
    prefill_context_s: Seconds
    """For each token of context of each prompt row."""

    def seconds(self, *, rows: float, decode_context: float, prefill_context: float) -> float:
        """Of one call with so many packed rows, whose contexts add up to these, in tokens."""
        attended_s = self.decode_context_s * decode_context + self.prefill_context_s * prefill_context
        return interpolated(self.rows, rows) + attended_s


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One device with weights of one dtype on one number of ranks, for models of one shape."""

    version: int = VERSION
    device: str
    """As SHARDLINE_DEVICE names it."""
    host: str
    hardware: str
    """Devices with the same value are taken for equal."""
    dtype: str
    """As SHARDLINE_DTYPE names it."""
    ranks: Annotated[int, msgspec.Meta(ge=1)] = 1
    """As SHARDLINE_TP has them."""
    model: str
    """Hash of the model's shapes: a profile is of no use for another one."""
    memory_bytes: Annotated[int, msgspec.Meta(ge=0)]
    """Free for weights, KV and activations."""
    host_memory: str | None = None
    """Whose memory it is, if a host's: its devices share it, also those in containers of other names. None: its own."""
    layers: dict[str, LayerTimes]
    """By kind of layer."""
    step: Points
    """What a step costs without layers: plan, embedding, dispatch, by packed rows."""
    sampled: Points
    """What the tail adds, by sampled rows: output layer and sampler."""
    tail_prefill_row_s: float
    """What the tail adds for each prompt row that is not sampled; below 0, since its last layer leaves them out."""
    frame_s: Seconds = 0.0
    """To take one frame and send another, without their bytes."""
    frame_byte_s: Seconds = 0.0
    """More, for each byte of a frame."""
    stream_bytes_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Weights that it reads from its disk in every step, if memory does not hold them; 0: it must hold all."""
    others_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Of the time in which it was measured, how much other programs had its cores."""
    machine: str = ""
    """All devices with the same value meet others over the same links."""
    links: dict[str, Link] = {}
    """To other machines and to its own, as far as they are measured."""

    @property
    def was_busy(self) -> bool:
        """Whether its times are too long to plan by: others had its cores for too much of them."""
        return self.others_share > BUSY_SHARE

    @property
    def way(self) -> tuple[str, int]:
        """How the device is used: its profiles differ in it."""
        return self.dtype, self.ranks

    @property
    def activation_dtype(self) -> str:
        """Stages pair only if it is equal: weights of int8 go with activations of bfloat16."""
        return "bfloat16" if self.dtype == "int8" else self.dtype

    @property
    def layers_s(self) -> float:
        """What it measured of one layer of each kind, all added up: to compare devices by."""
        return sum(seconds for times in self.layers.values() for _, seconds in times.rows)

    def scaled(self, factor: float) -> DeviceProfile:
        """Of a device that takes so many times as long for whatever it computes."""
        layers = {
            kind: LayerTimes(
                rows=_times(times.rows, factor),
                decode_context_s=times.decode_context_s * factor,
                prefill_context_s=times.prefill_context_s * factor,
            )
            for kind, times in self.layers.items()
        }
        return msgspec.structs.replace(
            self,
            layers=layers,
            step=_times(self.step, factor),
            sampled=_times(self.sampled, factor),
            tail_prefill_row_s=self.tail_prefill_row_s * factor,
        )

    def link(self, other: DeviceProfile) -> Link:
        """Between the two: what either has measured."""
        return self.links.get(other.machine) or other.links.get(self.machine) or NO_LINK


def read_profiles(data: bytes, field: str = "--devices") -> list[DeviceProfile]:
    """Reads one profile, or a list of them, from JSON. Raises Invalid, naming `field`."""
    try:
        found: object = msgspec.json.decode(data)
        profiles = msgspec.convert(found if isinstance(found, list) else [found], list[DeviceProfile])
    except msgspec.MsgspecError as error:
        raise Invalid(
            field, f"no device profile: {error}", "Give what `python -m services.stage profile` printed"
        ) from error
    for profile in profiles:
        if profile.version != VERSION:
            raise Invalid(field, f"version {profile.version} of a profile, not {VERSION}", "Measure the device again")
    return profiles


def profile_of(document: object, field: str) -> DeviceProfile:
    """A profile that a worker, maybe of another release, has put up. Raises Invalid, naming `field`, for one that no
    plan can be made with."""
    try:
        profile = msgspec.convert(document, DeviceProfile)
    except msgspec.MsgspecError as error:
        raise Invalid(field, f"no device profile: {error}", "Start the worker with this release") from error
    if profile.layers_s == 0:
        raise Invalid(field, "its layers take no time, which nothing can", "Measure the device again")
    return profile


def _times(points: Points, factor: float) -> Points:
    return tuple((rows, seconds * factor) for rows, seconds in points)


def interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at `x` on the line through its neighbors; behind the last point the last line goes on."""
    place = bisect_left(points, x, key=lambda point: point[0])
    if place == 0 or len(points) == 1:
        return points[0][1]
    place = min(place, len(points) - 1)
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))
