"""`python -m services.stage profile`: measures what a model's layers and ends cost on this stage's
device, in seconds.

Times are of the stage's own executor: first layers with the embedding, then the last layer with
output layer and sampler. A kind of layer costs what a step saves without it. Starts no thread and
talks to no server.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence
from hashlib import sha256
from itertools import accumulate
from pathlib import Path

import msgspec
import structlog
import torch
from pydantic import ValidationError

from services.stage.device.accelerator import load_module
from services.stage.device.acquire import acquire
from services.stage.device.contention import SchedulerTimes
from services.stage.device.device import INT4, INT8, Device
from services.stage.device.machine import boot_id
from services.stage.engine.accelerator_options import AcceleratorOptions
from services.stage.engine.executor import Executor
from services.stage.engine.memory import Limits
from services.stage.engine.step_graphs import CudaRecorder, Recorder
from services.stage.fleet.frame_cost import measure_frames
from services.stage.fleet.step_timing import CONTEXT, DECODES, Clock, FirstLayers, Tail
from services.stage.hop.zeromq import ZeroMqHop
from services.stage.hop_sockets import hop_sockets
from services.stage.model.cpu_parts import parse_parts
from services.stage.model.model_info import ModelInfo
from services.stage.products import cache
from services.stage.settings import StageSettings
from services.stage.streaming.streamed_layers import measure, store_of
from shardline.base import log
from shardline.base.clock import monotonic_s
from shardline.base.errors import Invalid, LinkLost, ShardlineError, Unavailable
from shardline_costs import DeviceProfile, ModelCosts
from shardline_costs.device_profile import VERSION, read_profiles
from shardline_costs.model_costs import KV_BYTES
from shardline_scheduler.kv_blocks import BLOCK_TOKENS, blocks_for

logger = structlog.get_logger(__name__)

LAYERS_BYTES = 128 << 20
"""Weights of the layers that are timed together, at least: a step finds none of them in a cache."""
PROFILES = "profiles"
"""Folder in the cache."""


def profile(
    settings: StageSettings, device: Device, *, fresh: bool, together: bool
) -> DeviceProfile:
    """Returns the profile of these settings' model on a device of this process, known or measured.

    `fresh`: measured anyway. `together`: for a plan; prints `ready`, then waits for a line on
    standard input, so that devices are timed side by side, as they will work. What was measured
    while others used the device is measured again. Raises what `Executor.load` raises.
    """
    device.enter_thread()
    info = ModelInfo.read(settings.model, settings.model_revision, cache_folder=settings.cache_dir)
    if info.encoder is not None:
        problem = f"{settings.name} is an encoder, for which no plan is made"
        raise Invalid("SHARDLINE_MODEL", problem, "Set SHARDLINE_SPLIT=even")
    model = ModelCosts.read(info.path)
    known = None if fresh else _recalled(settings, device, model)
    # a worker that starts again does not wait for it
    if known is not None and known.was_busy and together:
        known = None
    measuring = None if known else _Measuring(settings, info, model, device)
    if together:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()
    if known is not None or measuring is None:
        assert known is not None
        return _here(known, settings)
    found = measuring.profile()
    _remember(found, settings, device, model)
    return _here(found, settings)


def recalled(settings: StageSettings, device: Device, folder: Path) -> DeviceProfile | None:
    """The profile of a device with these settings and the model in this folder, if it was measured
    once."""
    try:
        known = _recalled(settings, device, ModelCosts.read(folder))
    except Invalid:  # a model that is not planned for may be served
        return None
    return _here(known, settings) if known is not None else None


def retime(settings: StageSettings, device: Device, folder: Path, profile: DeviceProfile) -> None:
    """The known profile gets the times of this one, which has drifted: the next start recalls
    them."""
    model = ModelCosts.read(folder)
    known = _recalled(settings, device, model)
    if known is not None:
        times = {
            name: getattr(profile, name)
            for name in ("layers", "step", "sampled", "tail_prefill_row_s")
        }
        _remember(msgspec.structs.replace(known, **times), settings, device, model)


class _Measuring:
    """A device with loaded layers."""

    def __init__(
        self, settings: StageSettings, info: ModelInfo, model: ModelCosts, device: Device
    ) -> None:
        self._settings = settings
        self._model = model
        self._device = device
        # Before anything computes: threads of a product that wait for the next one take time of the
        # processor.
        self._frame_s, self._frame_byte_s = _frames(settings, model)
        self._memory_bytes = device.available_bytes()
        self._stream_bytes_per_s = (
            measure(store_of(device.uploads(), settings.streaming_folder), device.synchronize)
            if settings.streams_on(cores=device.is_cpu)
            else 0.0
        )
        first = self._load(info, range(_num_layers(model, settings.dtype)))
        self._first = FirstLayers(first, model, Clock(device), self._recorder_of(first))
        last = (
            first
            if first.is_last
            else self._load(info, range(info.num_layers - 1, info.num_layers))
        )
        self._tail = Tail(last, Clock(device))
        self._loaded = {first, last}

    def _load(self, info: ModelInfo, layers: range) -> Executor:
        settings = self._settings
        num_decodes = min(DECODES, settings.token_budget)
        num_tokens = (
            max(settings.token_budget, num_decodes * blocks_for(CONTEXT + 1)) * BLOCK_TOKENS
        )
        kinds = [self._model.layers[number] for number in layers]
        kv_numbers = sum(kind.kv_numbers for kind in kinds)
        state_bytes = num_decodes * sum(kind.state_bytes for kind in kinds)
        limits = Limits(
            # More than counted: stored values are padded, and states get a share of it.
            kv_bytes=2 * num_tokens * kv_numbers * KV_BYTES[settings.dtype] + 4 * state_bytes,
            token_budget=settings.token_budget,
            max_open=settings.token_budget,
        )
        return Executor.load(
            model=info,
            layers=layers,
            device=self._device,
            dtype=settings.dtype,
            limits=limits,
            cache_folder=settings.cache_dir,
            on_accelerator=AcceleratorOptions(
                cpu_parts=parse_parts(settings.cpu_parts),
                products=settings.gpu_products,
                cuda_graphs=False,  # passes that leave layers out need other graphs
            ),
        )

    def _recorder_of(self, executor: Executor) -> Recorder | None:
        """What records steps here, if they will run as graphs."""
        settings = self._settings
        if executor.forward.is_recurrent:
            return None
        shard = executor.forward.shard
        options = AcceleratorOptions(
            cpu_parts=parse_parts(settings.cpu_parts), cuda_graphs=settings.cuda_graphs
        )
        has_graphs = options.records_graphs(shard.device, shard.model, shard.streamed_layers)
        return CudaRecorder() if has_graphs else None

    def profile(self) -> DeviceProfile:
        """Runs for some seconds."""
        began_s = monotonic_s()
        began = SchedulerTimes.now()
        with torch.inference_mode():
            layers, step = self._first.measure()
        sampled, tail_prefill_row_s = self._tail.measure()
        # Stages that share their cores wait for each other, as they will when they work.
        others_share = (
            0.0 if self._settings.device_shared else SchedulerTimes.now().waited_share(began)
        )
        for executor in self._loaded:
            executor.drop()
        logger.info(
            "device measured", device=self._device.name, seconds=round(monotonic_s() - began_s, 1)
        )
        return DeviceProfile(
            device=self._device.name,
            host=socket.gethostname(),
            hardware=_hash(
                [*self._device.identity(), str(self._device.num_threads), *_ranks(self._settings)]
            ),
            dtype=self._settings.dtype,
            ranks=self._settings.tp,
            model=self._model.shapes_id,
            memory_bytes=self._memory_bytes,
            host_memory=boot_id() if self._device.is_cpu else None,
            frame_s=self._frame_s,
            frame_byte_s=self._frame_byte_s,
            stream_bytes_per_s=self._stream_bytes_per_s,
            layers=layers,
            step=step,
            sampled=sampled,
            tail_prefill_row_s=tail_prefill_row_s,
            others_share=others_share,
        )


def _here(profile: DeviceProfile, settings: StageSettings) -> DeviceProfile:
    """Returns it for this machine since its start, with the memory that the stage may take: a limit
    makes it its own, next to other stages of the host."""
    machine = boot_id()
    memory_bytes = profile.memory_bytes
    host_memory = None if profile.host_memory is None else machine
    if settings.memory_bytes is not None:
        host_memory = None
        memory_bytes = min(memory_bytes, settings.memory_bytes)
    return msgspec.structs.replace(
        profile, memory_bytes=memory_bytes, host_memory=host_memory, machine=machine
    )


def _frames(settings: StageSettings, model: ModelCosts) -> tuple[float, float]:
    """What a frame costs this stage's process, and each byte of it, in seconds."""
    sockets = hop_sockets(settings)
    dtype = "bfloat16" if settings.dtype in {INT8, INT4} else settings.dtype
    try:
        hop = ZeroMqHop(sockets, settings.times)
        small, large = ((rows, model.hidden_size) for rows in (1, settings.token_budget))
        return measure_frames(hop, dtype=dtype, small=small, large=large)
    except LinkLost as error:
        raise Unavailable(f"the cost of a frame cannot be measured: {error}") from error
    finally:
        sockets.close()


def _num_layers(model: ModelCosts, dtype: str) -> int:
    """Returns how many first layers have each kind, and more weights than a cache, if possible."""
    with_all_kinds = 1 + max(
        [kind.name for kind in model.layers].index(name) for name in model.kinds
    )
    sizes = accumulate(kind.num_weights * model.weight_bytes(dtype) for kind in model.layers)
    large = 1 + sum(size < LAYERS_BYTES for size in sizes)
    return min(max(with_all_kinds, large), len(model.layers))


def _recalled(settings: StageSettings, device: Device, model: ModelCosts) -> DeviceProfile | None:
    return _known(cache.recall(settings.cache_dir / PROFILES, _file_name(settings, device, model)))


def _remember(
    profile: DeviceProfile, settings: StageSettings, device: Device, model: ModelCosts
) -> None:
    text = msgspec.json.encode(profile).decode()
    cache.store(settings.cache_dir / PROFILES, _file_name(settings, device, model), text)


def _file_name(settings: StageSettings, device: Device, model: ModelCosts) -> str:
    limits = [
        settings.dtype,
        str(settings.token_budget),
        settings.cpu_parts,
        settings.gpu_products,
        str(settings.cuda_graphs),
        str(VERSION),
    ]
    limits += [str(settings.streaming_folder)] if settings.streams_on(cores=device.is_cpu) else []
    limits += ["shared"] if settings.device_shared else []  # its threads wait in another way
    limits += _ranks(settings)
    key = [
        socket.gethostname(),
        device.name,
        str(device.num_threads),
        *limits,
        *device.identity(),
        model.shapes_id,
    ]
    return f"{_hash(key)}.json"


def _ranks(settings: StageSettings) -> list[str]:
    """What the number of ranks adds to the facts that times depend on."""
    return [f"{settings.tp} ranks"] if settings.tp > 1 else []


def _known(text: str | None) -> DeviceProfile | None:
    """None also for a file that another release wrote."""
    try:
        return read_profiles(text.encode())[0] if text else None
    except Invalid as error:
        logger.info("a profile is measured again", reason=error.problem)
        return None


def _hash(parts: Sequence[str]) -> str:
    return sha256("\0".join(parts).encode()).hexdigest()[:16]


def main(arguments: list[str]) -> int:
    """Prints a device's profile as one line of JSON; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m services.stage profile",
        description="Measures the model of SHARDLINE_MODEL in SHARDLINE_DTYPE on SHARDLINE_DEVICE; "
        "takes some seconds.",
    )
    parser.add_argument("--fresh", action="store_true", help="measure again what is known")
    parser.add_argument(
        "--together",
        action="store_true",
        help="print `ready` when loaded, and begin at a line on standard input",
    )
    options = parser.parse_args(arguments)
    try:
        settings = StageSettings()
        log.configure(service="stage", level=settings.log_level, form=settings.log_format)
        load_module(settings.device_module)
        device = acquire(
            settings.device,
            worker="profile",
            lock_folder=settings.lock_dir,
            shared=settings.device_shared,
            num_cores=settings.stage_cores,
            num_ranks=settings.tp,
        )
        found = profile(settings, device, fresh=options.fresh, together=options.together)
    except (ValidationError, ShardlineError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    return 0
