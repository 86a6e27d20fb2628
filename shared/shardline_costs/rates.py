"""What a device's profile means in the usual units: bytes and operations per second. For people and
dashboards; plans use the times themselves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import msgspec

from shardline_costs.device_profile import DeviceProfile, LayerTimes, interpolated
from shardline_costs.model_costs import KV_BYTES, LayerKind, ModelCosts


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of a device over a model's layers, all that a layer costs included."""

    weight_bytes_per_s: float
    """At which one row streams the weights that it meets."""
    flops: tuple[tuple[float, float], ...]
    """(packed rows, operations of products per second), by rows."""
    kv_bytes_per_s: float | None
    """At which decode rows stream the keys and values of their context; None: too fast to be
    measured."""

    @classmethod
    def of(cls, profile: DeviceProfile, model: ModelCosts) -> Rates:
        """Averages over the layers of the model. The profile must know each kind of them."""
        counts = Counter(kind.name for kind in model.layers)
        weights = sum(num * _active_weights(model.kinds[name]) for name, num in counts.items())
        kv_bytes = (
            sum(num * model.kinds[name].kv_numbers for name, num in counts.items())
            * KV_BYTES[profile.dtype]
        )
        context_s = sum(num * profile.layers[name].decode_context_s for name, num in counts.items())
        rows = [rows for rows, _ in next(iter(profile.layers.values())).rows]
        seconds = {num: _seconds(profile.layers, counts, num) for num in (1.0, *rows)}
        return cls(
            weight_bytes_per_s=weights * model.weight_bytes(profile.dtype) / seconds[1.0],
            flops=tuple((num, 2 * num * weights / seconds[num]) for num in rows),
            kv_bytes_per_s=kv_bytes / context_s if context_s else None,
        )


def _active_weights(kind: LayerKind) -> int:
    """Counts of experts only those that a row meets."""
    return sum(math.prod(shape) for shape in kind.products)


def _seconds(layers: Mapping[str, LayerTimes], counts: Mapping[str, int], rows: float) -> float:
    """Returns the seconds of all layers for `rows` rows; never 0, so that a rate is finite."""
    return max(
        1e-9, sum(num * interpolated(layers[name].rows, rows) for name, num in counts.items())
    )
