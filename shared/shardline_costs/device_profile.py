"""What a worker measured of its device: the times of a model's parts, as a record that travels as
JSON.

Times are of the model's own layers through the stage's own code, so that one number holds all that
a layer costs: products, norms, calls. `python -m services.stage profile` writes it. Knows no plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Annotated

import msgspec

from shardline.base.errors import Invalid
from shardline_costs.model_costs import WEIGHT_BYTES

VERSION = 3
BUSY_SHARE = 0.1
FIELD = "--devices"
MAX_S = 1e6
"""Of anything that is measured: far longer than a worker would measure it."""
MAX_BYTES = 1 << 60
MAX_DIMENSION = 1e12
"""Of rows, and of bytes per second."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_S)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=MAX_DIMENSION)]
Points = Annotated[tuple[tuple[Rate, Seconds], ...], msgspec.Meta(min_length=1, max_length=64)]
"""(rows, seconds), by rows."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What frames between two machines meet, while no stage works for them."""

    latency_s: Seconds
    bytes_per_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_DIMENSION)]

    def seconds(self, num_bytes: float) -> float:
        """Returns the time from the end of a frame's sending to its arrival."""
        return self.latency_s + num_bytes / self.bytes_per_s


NO_LINK = Link(latency_s=0.0, bytes_per_s=1e9)
"""Stands for what was not measured."""


class LayerTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One layer of one kind."""

    rows: Points
    """Without any context: products and all that a row costs."""
    decode_context_s: Seconds
    """For each token of context of each decode row."""
    prefill_context_s: Seconds
    """For each token of context of each prompt row."""

    def seconds(self, *, rows: float, decode_context: float, prefill_context: float) -> float:
        """Returns the time of one call with this many packed rows and contexts that add up to
        these, in tokens."""
        attended_s = (
            self.decode_context_s * decode_context + self.prefill_context_s * prefill_context
        )
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
    memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
    """Free for weights, KV and activations."""
    host_memory: str | None = None
    """The host that owns the memory, if one does: its devices share it, also those in containers of
    other names. None: its own."""
    layers: dict[str, LayerTimes]
    """By kind of layer."""
    step: Points
    """What a step costs without layers: plan, embedding, dispatch, by packed rows."""
    sampled: Points
    """What the tail adds, by sampled rows: output layer and sampler."""
    tail_prefill_row_s: Annotated[float, msgspec.Meta(ge=-MAX_S, le=MAX_S)]
    """What the tail adds for each prompt row that is not sampled; below 0, since its last layer
    leaves them out."""
    frame_s: Seconds = 0.0
    """To take one frame and send another, without their bytes."""
    frame_byte_s: Seconds = 0.0
    """More, for each byte of a frame."""
    stream_bytes_per_s: Rate = 0.0
    """Weights that it reads from its disk in every step, if memory does not hold them; 0: it must
    hold all."""
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
        """Stages pair only if it is equal: weights of int8 and int4 go with activations of
        bfloat16."""
        return "bfloat16" if self.dtype in {"int8", "int4"} else self.dtype

    @property
    def layers_s(self) -> float:
        """What it measured of one layer of each kind, all added up: to compare devices by."""
        return sum(seconds for times in self.layers.values() for _, seconds in times.rows)

    def scaled(self, factor: float) -> DeviceProfile:
        """Returns the profile of a device that takes `factor` times as long for whatever it
        computes."""
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


def read_profiles(data: bytes, field: str = FIELD) -> list[DeviceProfile]:
    """Reads one profile, or a list of them, from JSON. Raises Invalid, naming `field`."""
    try:
        found: object = msgspec.json.decode(data)
    except msgspec.MsgspecError as error:
        raise _no_profile(field, str(error)) from error
    return [profile_of(each, field) for each in (found if isinstance(found, list) else [found])]


def profile_of(found: object, field: str = FIELD) -> DeviceProfile:
    """Takes a profile as JSON has it. Raises Invalid, naming `field`, for one of another version,
    without a part, with times that are no numbers or that no device takes, or without any time in a
    layer."""
    if isinstance(found, dict) and found.get("version", VERSION) != VERSION:
        raise Invalid(
            field,
            f"version {found['version']} of a profile, not {VERSION}",
            "Measure the device again",
        )
    try:
        profile = msgspec.convert(found, DeviceProfile)
    except msgspec.MsgspecError as error:
        raise _no_profile(field, str(error)) from error
    if profile.dtype not in WEIGHT_BYTES:
        raise _no_profile(field, f"{profile.device} has weights of {profile.dtype!r}")
    for name, points in _measured(profile):
        if any(not left < right for (left, _), (right, _) in pairwise(points)):
            raise _no_profile(
                field, f"{profile.device} has times of {name} that are not in order of rows"
            )
    idle = [
        kind
        for kind, times in profile.layers.items()
        if not any(seconds for _, seconds in times.rows)
    ]
    if idle or not profile.layers:
        what = f"layers of {', '.join(idle)}" if idle else "its layers"
        raise _no_profile(field, f"{profile.device}: {what} take no time")
    return profile


def check_profiles(profiles: Iterable[DeviceProfile], field: str = FIELD) -> None:
    """Raises Invalid, as `profile_of`, if one of them is none that a device has."""
    for profile in profiles:
        profile_of(msgspec.to_builtins(profile), field)


def _measured(profile: DeviceProfile) -> list[tuple[str, Points]]:
    layers = [(kind, times.rows) for kind, times in profile.layers.items()]
    return [*layers, ("steps", profile.step), ("sampled rows", profile.sampled)]


def _no_profile(field: str, problem: str) -> Invalid:
    return Invalid(
        field,
        f"no device profile: {problem}",
        "Give what `python -m services.stage profile` printed",
    )


def _times(points: Points, factor: float) -> Points:
    return tuple((rows, seconds * factor) for rows, seconds in points)


def interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at `x` on the line through its neighbors; behind the last point the last line goes
    on."""
    place = bisect_left(points, x, key=lambda point: point[0])
    if place == 0 or len(points) == 1:
        return points[0][1]
    place = min(place, len(points) - 1)
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))
