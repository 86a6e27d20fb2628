"""A device that was not measured: its profile by what its vendor publishes of it. Knows no fleet.

A product takes the longer of two times: its weights stream from memory, or its rows are computed at
the peak. What a real device reaches of both is assumed, as is what else a layer costs.
"""

from __future__ import annotations

import math

from shardline_costs import DeviceProfile, LayerTimes, ModelCosts
from shardline_costs.device_profile import Points
from shardline_costs.model_costs import KV_BYTES, LayerKind
from shardline_fleet.simulator.datasheets import Datasheet
from shardline_fleet.simulator.fleet_file import Assumptions

ROWS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Packed rows between which times are straight lines."""
MEMORY_SHARE = 0.9
"""Of a device's memory; libraries and the driver have the rest."""
FRAME_S = 1e-4
FRAME_BYTE_S = 7e-10
"""As measured on cores: docs/decisions/measured-split.md."""


def profile_of(
    sheet: Datasheet, model: ModelCosts, assumed: Assumptions, device: str, machine: str
) -> DeviceProfile:
    """The profile that a worker with this device would have measured, if the assumptions hold."""
    bytes_per_s = sheet.gb_per_s * 1e9 * assumed.bandwidth
    flops = sheet.tflops * 1e12 * assumed.compute
    weight_bytes = model.weight_bytes(sheet.dtype)

    def product_s(num_weights: int, rows: float) -> float:
        return max(num_weights * weight_bytes / bytes_per_s, 2 * num_weights * rows / flops)

    def points(num_weights: int, extra_s: float) -> Points:
        return tuple((rows, product_s(num_weights, rows) + extra_s) for rows in ROWS)

    def layer(kind: LayerKind) -> LayerTimes:
        active = sum(math.prod(shape) for shape in kind.products)
        query_size = kind.products[0][1] - kind.kv_numbers
        return LayerTimes(
            rows=points(active, assumed.layer_us / 1e6),
            decode_context_s=kind.kv_numbers * KV_BYTES[sheet.dtype] / bytes_per_s,
            prefill_context_s=4 * query_size / flops,
        )

    return DeviceProfile(
        device=device,
        host=machine,
        machine=machine,
        hardware=sheet.name,
        dtype=sheet.dtype,
        model=model.shapes_id,
        memory_bytes=int(sheet.memory_gb * 1e9 * MEMORY_SHARE),
        layers={name: layer(kind) for name, kind in model.kinds.items()},
        step=((1, assumed.layer_us / 1e6),),
        sampled=points(model.embedding_weights, assumed.layer_us / 1e6),
        tail_prefill_row_s=0.0,
        frame_s=FRAME_S,
        frame_byte_s=FRAME_BYTE_S,
    )
