"""A stage at run time: what its process is made of, started and stopped in order. Knows no Celery
worker.

`Head` and `Follower` put the parts together; `Stage` is what Celery's side sees of either.
"""

from __future__ import annotations

import math
import os
import platform
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from uuid import uuid4

import msgspec
import structlog
import torch
import transformers

from services.stage.adapters.adapter_watch import AdapterWatch, Tell
from services.stage.celery.hub_calls import HubCalls
from services.stage.celery.pool import DeliveryHandler
from services.stage.celery.subscription import QueueSubscription
from services.stage.device.accelerator import load_module
from services.stage.device.acquire import acquire
from services.stage.device.device import Device
from services.stage.device.machine import boot_id
from services.stage.device.power import Power, power_of
from services.stage.engine.accelerator_options import AcceleratorOptions
from services.stage.engine.executor import Executor
from services.stage.engine.memory import Limits
from services.stage.engine.tensors import name_of
from services.stage.hop.sockets import SocketFactory
from services.stage.hop_sockets import hop_sockets
from services.stage.layer_range import layers_of
from services.stage.model.cpu_parts import parse_parts
from services.stage.model.model_info import ModelInfo
from services.stage.model.weights import fingerprint, unchanged
from services.stage.settings import StageSettings
from shardline.base.clock import monotonic_s, wall_clock_s
from shardline.base.errors import Invalid
from shardline.contract.wire import Capacity, StageCard, StageTrace, StepSpan
from shardline_costs import DeviceProfile, ModelCosts
from shardline_costs.drift import WINDOW_S, Drift
from shardline_scheduler.step_times import StepTime
from shardline_server.host.threads import run_in_fresh_thread

log = structlog.get_logger(__name__)

MIB = 1 << 20


class Stage(Protocol):
    """What the Celery app carries as `app.shardline`."""

    worker: str
    drain_s: float
    skips_drain: bool
    """When it stops it gives its jobs back at once, because another stage waits for its exit."""
    interactive_seats: int
    hub: HubCalls

    @property
    def subscription(self) -> QueueSubscription | None:
        """Returns that to the queue of the model's jobs; None where Celery serves remote control
        only."""

    @property
    def delivery_handler(self) -> DeliveryHandler:
        """Returns what takes the pool's deliveries."""

    def start(self) -> None:
        """Start the threads."""

    def describe(self) -> Mapping[str, Any]:
        """Returns what `inspect stage` shows."""

    def trace(self) -> Mapping[str, Any]:
        """Returns what `shardline trace` shows."""

    def stop(self) -> None:
        """Ends the threads and gives the device back, after Celery has stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStage:
    """A stage that holds its device and has read no weights yet."""

    settings: StageSettings
    info: ModelInfo
    layers: range
    """Empty if they come from a plan."""
    device: Device
    worker: str
    profile: DeviceProfile | None = None
    """What the device takes for this model, if it was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedStage:
    """The parts that heads and later stages share: a loaded shard on its device, and how it is
    reached."""

    settings: StageSettings
    info: ModelInfo
    layers: range
    device: Device
    executor: Executor
    card: StageCard
    sockets: SocketFactory
    worker: str
    drift: Drift | None = None
    """None: the device was never measured."""
    power: Power | None = None
    """None: what the device draws is unknown."""

    @property
    def is_head(self) -> bool:
        """It holds the first layer."""
        return self.layers.start == 0

    @property
    def watts(self) -> float:
        """Returns what the device has drawn while it computed; 0 where unknown."""
        return self.power.watts if self.power else 0.0

    def watch_adapters(self, tell: Tell = lambda _: None) -> AdapterWatch | None:
        """Returns the watch of its folder, if it has one; not started."""
        settings = self.settings
        if settings.adapters_dir is None:
            return None
        return AdapterWatch(self.executor.adapters, every_s=settings.times.poll_s, tell=tell)

    def describe(self) -> dict[str, Any]:
        """Returns facts for people and tests."""
        executor = self.executor
        return {
            "model": self.settings.name,
            "layers": [self.layers.start, self.layers.stop],
            "num_layers": self.info.num_layers,
            "device": self.device.name,
            "ranks": [os.getpid(), *(self.device.ranks.pids if self.device.ranks else ())],
            "dtype": self.settings.dtype,
            "power": self.power.source if self.power else None,
            "attention": executor.attention_kind,
            "exact": executor.exact,
            "kv_blocks": executor.num_blocks,
            "kv_blocks_used": executor.blocks_used,
            "streamed_layers": len(executor.forward.shard.streamed_layers),
            "states": executor.num_states,
            "states_used": executor.states_used,
            "kv_slots": executor.offload.num_slots,
            "kv_slot_move_us": round(executor.offload.move_s * 1e6),
            "sequences": executor.num_open,
            "adapters": executor.num_adapters,
        }

    def trace(self, pipeline: str, times: Iterable[StepTime]) -> dict[str, Any]:
        """The steps as a StageTrace of JSON."""
        to_wall_s = wall_clock_s() - monotonic_s()
        return msgspec.to_builtins(
            StageTrace(
                worker=self.worker,
                pipeline=pipeline,
                layers=(self.layers.start, self.layers.stop),
                steps=tuple(_span(each, to_wall_s) for each in times),
            )
        )


def _span(step: StepTime, to_wall_s: float) -> StepSpan:
    return StepSpan(
        epoch=step.epoch,
        step=step.step,
        began_us=_us(step.began_s + to_wall_s),
        compute_began_us=_us(step.compute_began_s + to_wall_s),
        compute_us=_us(step.compute_s),
        ended_us=_us(step.ended_s + to_wall_s),
        wait_us=_us(step.wait_s),
        idle_us=_us(step.idle_s),
        rows=step.num_rows,
        tokens=step.num_tokens,
        context=step.num_context,
        sampled=step.num_sampled,
    )


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def place(settings: StageSettings) -> PlacedStage:
    """The model's config and the device, which is locked: no other process of this name runs on it.
    Raises Invalid, Unavailable."""
    if settings.kv_offload_mib and not settings.prefix_cache:
        problem = (
            "it needs the prefix cache, which finds KV that comes back, "
            "and SHARDLINE_PREFIX_CACHE is false"
        )
        raise Invalid(
            "SHARDLINE_KV_OFFLOAD_MIB", problem, "Leave the prefix cache on, or set this to 0"
        )
    if settings.further_models and not settings.is_planned:
        raise Invalid(
            "SHARDLINE_FURTHER_MODELS",
            "only a fleet changes models",
            "Set SHARDLINE_LAYERS=planned",
        )
    info = info_of(settings)
    if info.encoder is not None and (settings.is_planned or settings.tp > 1):
        field = "SHARDLINE_LAYERS" if settings.is_planned else "SHARDLINE_TP"
        problem = f"{settings.name} is an encoder, which no plan and no ranks divide"
        raise Invalid(field, problem, "Set SHARDLINE_SPLIT=even and SHARDLINE_TP=1")
    layers = layers_of(settings, info.num_layers, info.joined)
    name = settings.worker_name or f"{settings.pipeline or settings.name}.{settings.place}"
    worker = f"{name}@{socket.gethostname()}"
    load_module(settings.device_module)
    device = acquire(
        settings.device,
        worker=worker,
        lock_folder=settings.lock_dir,
        shared=settings.device_shared,
        num_cores=settings.stage_cores,
        num_ranks=settings.tp,
        nice=settings.nice,
    )
    if settings.is_planned and not settings.worker_name:
        device_name = device.name.replace(":", "-").replace(",", "+")
        worker = f"{settings.name}.{device_name}@{socket.gethostname()}"
    return PlacedStage(settings=settings, info=info, layers=layers, device=device, worker=worker)


def info_of(settings: StageSettings) -> ModelInfo:
    """The model's config, fetched from the hub if need be. Raises Invalid, Unavailable."""
    return ModelInfo.read(settings.model, settings.model_revision, cache_folder=settings.cache_dir)


def limits_of(settings: StageSettings, info: ModelInfo) -> Limits:
    """The memory and the sequences of this stage. An encoder's step has room for one text at
    least."""
    least = 0 if info.encoder is None else info.context_length
    return Limits(
        kv_bytes=settings.kv_mib * MIB if settings.kv_mib else None,
        kv_share=settings.kv_share,
        memory_bytes=settings.memory_bytes,
        offload_bytes=settings.kv_offload_mib * MIB,
        offload_folder=settings.kv_offload_dir,
        streamed_layers=settings.streamed_layers,
        streamed_folder=settings.streaming_folder,
        token_budget=max(settings.token_budget, least),
        max_open=2 * (settings.seats + settings.interactive_seats),
        adapters_folder=settings.adapters_dir,
        max_adapters=settings.adapters,
    )


def load(placed: PlacedStage) -> LoadedStage:
    """Weights, sockets: what can be refused is refused before Celery starts. Raises Invalid,
    Unavailable."""
    settings = placed.settings
    info = placed.info
    layers = placed.layers
    device = placed.device
    worker = placed.worker
    with unchanged(info.path):
        loading = partial(
            Executor.load,
            model=info,
            layers=layers,
            device=device,
            dtype=settings.dtype,
            limits=limits_of(settings, info),
            cache_folder=settings.cache_dir,
            on_accelerator=AcceleratorOptions(
                cpu_parts=parse_parts(settings.cpu_parts),
                products=settings.gpu_products,
                cuda_graphs=settings.cuda_graphs,
            ),
        )
        executor = run_in_fresh_thread(loading)
        weights = fingerprint(info.path, settings.cache_dir)
    log.info(
        "shard loaded",
        worker=worker,
        layers=f"{layers.start}-{layers.stop - 1}",
        device=device.name,
        attention=executor.attention_kind,
        exact=executor.exact,
        kv_blocks=executor.num_blocks,
        states=executor.num_states,
    )
    power = power_of(device, settings.device_watts)
    return LoadedStage(
        settings=settings,
        info=info,
        layers=layers,
        device=device,
        executor=executor,
        card=_card(placed, executor, weights, power),
        sockets=hop_sockets(settings),
        worker=worker,
        drift=_drift_of(placed, executor),
        power=power,
    )


def capacity_of(executor: Executor, power: Power | None) -> Capacity:
    """Returns what the stage's card tells heads."""
    return Capacity(
        num_blocks=executor.num_blocks,
        exactness=executor.fingerprint,
        exact=executor.exact,
        num_slots=executor.offload.num_slots,
        num_states=executor.num_states,
        move_us=math.ceil(executor.offload.move_s * 1e6),
        power=power.source if power else "",
    )


def _card(placed: PlacedStage, executor: Executor, weights: str, power: Power | None) -> StageCard:
    return StageCard(
        incarnation=uuid4().hex,
        worker=placed.worker,
        model=placed.settings.name,
        fingerprint=weights,
        dtype=name_of(executor.dtype),
        first_layer=placed.layers.start,
        last_layer=placed.layers.stop,
        num_layers=placed.info.num_layers,
        control="",
        device=placed.device.name,
        pid=os.getpid(),
        weights_dtype=placed.settings.dtype,
        machine=boot_id(),
        capacity=capacity_of(executor, power),
    )


def _drift_of(placed: PlacedStage, executor: Executor) -> Drift | None:
    if placed.profile is None:
        return None
    window_s = WINDOW_S * placed.settings.time_scale
    streams = bool(executor.forward.shard.streamed_layers)
    return Drift(
        placed.profile,
        ModelCosts.read(placed.info.path),
        placed.layers,
        window_s=window_s,
        streams=streams,
    )


def pipeline_of(settings: StageSettings, worker: str, device: Device) -> str:
    """The name of the pipeline that a head leads, the same after each start: workers of a fleet may
    share a device."""
    if settings.is_planned:
        return settings.pipeline or f"{settings.name}:{worker}"
    return settings.pipeline or f"{settings.name}:{worker.partition('@')[2]}:{device.name}"


def software() -> dict[str, str]:
    """What computed a result."""
    return {
        "machine": platform.machine(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
