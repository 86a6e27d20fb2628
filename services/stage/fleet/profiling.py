"""`python -m services.stage profile`: measures what a model's layers and ends cost on this stage's
device, in seconds.

Times are of the stage's own executor: first layers with the embedding, then the last layer with
output layer and sampler. A kind of layer costs what a step saves without it. Starts no thread and
talks to no server.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from pathlib import Path

import msgspec
import structlog
import torch
from pydantic import ValidationError

from services.stage.attention.paged_kv import Span
from services.stage.device.accelerator import load_module
from services.stage.device.acquire import acquire
from services.stage.device.contention import SchedulerTimes
from services.stage.device.device import Device
from services.stage.device.machine import boot_id
from services.stage.engine.accelerator_options import AcceleratorOptions
from services.stage.engine.executor import Executor
from services.stage.engine.memory import Limits
from services.stage.fleet.frame_cost import measure_frames
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
from shardline.contract.job import SamplingParams
from shardline_fleet.planner import DeviceProfile, LayerTimes, ModelCosts
from shardline_fleet.planner.device_profile import VERSION, Points, read_profiles
from shardline_fleet.planner.model_costs import KV_BYTES, WEIGHT_BYTES
from shardline_scheduler.kv_blocks import BLOCK_TOKENS, blocks_for
from shardline_scheduler.step_plan import Open, Row, StepPlan

logger = structlog.get_logger(__name__)

ROWS = (1, 8, 32, 64, 128, 256, 512, 1024)
"""Packed rows of the steps that are timed, up to the token budget."""
SAMPLED = (1, 8, 32, 64)
# of layers, whatever a busy machine measures: no plan can be made of those that take no time
LEAST_S = 1e-7
DECODES = 32
"""Sequences of the steps that tell what a token of context costs."""
CONTEXT = 8 * BLOCK_TOKENS - 1
"""Tokens before each of their rows."""
CHUNKS_BEFORE = 4
"""Whole chunks before the one that tells what a prompt's row pays for each token of context."""
LAYERS_BYTES = 128 << 20
"""Weights of the layers that are timed together, at least: a step finds none of them in a cache."""
POINT_S = 0.15
"""Time for one figure, in which three runs are made at least."""
MIN_RUNS = 3
SLOW_S = 1.0
"""A run that takes longer, once warm, is timed once: a slow device must not cost minutes."""
PROFILES = "profiles"
"""Folder in the cache."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Times runs on one device."""

    device: Device

    def seconds(self, run: Callable[[], object]) -> float:
        """Returns the lower quartile of runs after a first one: other users only add."""
        run()  # not timed: it may compile kernels
        times = [self._once_s(run)]
        if times[0] > SLOW_S:
            return times[0]
        end_s = monotonic_s() + POINT_S
        while len(times) < MIN_RUNS or monotonic_s() < end_s:
            times.append(self._once_s(run))
        return statistics.quantiles(times)[0]

    def _once_s(self, run: Callable[[], object]) -> float:
        self.device.synchronize()
        began_s = monotonic_s()
        run()
        self.device.synchronize()
        return monotonic_s() - began_s


class FirstLayers:
    """Times steps of a shard that holds the embedding and some first layers."""

    def __init__(self, executor: Executor, model: ModelCosts, clock: Clock) -> None:
        self._forward = executor.forward
        self._clock = clock
        self._budget = executor.token_budget
        self._num_blocks = executor.num_blocks
        self._kinds: dict[str, list[int]] = {}
        for number in executor.layers:
            self._kinds.setdefault(model.layers[number].name, []).append(number)

    def measure(self) -> tuple[dict[str, LayerTimes], Points]:
        """Returns the times of each kind of layer, and those of a step without layers, by packed
        rows."""
        num_rows = [rows for rows in ROWS if rows < self._budget] + [self._budget]
        by_rows = {rows: self._parts(_decodes(rows, before=0)) for rows in num_rows}
        decodes = min(DECODES, self._budget, self._num_blocks // blocks_for(CONTEXT + 1))
        short, long = (self._parts(_decodes(decodes, before=before)) for before in (0, CONTEXT))
        chunk = self._budget
        before = CHUNKS_BEFORE * self._budget
        early, late = (self._parts(_chunk(start, chunk)) for start in (0, before))
        layers = {
            kind: LayerTimes(
                rows=tuple((rows, parts[kind]) for rows, parts in by_rows.items()),
                decode_context_s=max(0.0, long[kind] - short[kind]) / (decodes * CONTEXT),
                prefill_context_s=max(0.0, late[kind] - early[kind]) / (chunk * before),
            )
            for kind in self._kinds
        }
        return layers, tuple((rows, parts[""]) for rows, parts in by_rows.items())

    def _parts(self, spans: Sequence[Span]) -> dict[str, float]:
        """Seconds of one layer of each kind, and under "" those of the step without layers."""
        whole_s = self._seconds(spans, ())
        saved = {
            kind: max(LEAST_S, whole_s - self._seconds(spans, layers))
            for kind, layers in self._kinds.items()
        }
        parts = {kind: saved_s / len(self._kinds[kind]) for kind, saved_s in saved.items()}
        return {**parts, "": max(0.0, whole_s - sum(saved.values()))}

    def _seconds(self, spans: Sequence[Span], left_out: Iterable[int]) -> float:
        """Returns the time of a step without these layers."""
        x = self._forward.random_inputs(
            sum(span.length for span in spans), torch.Generator().manual_seed(0)
        )
        with self._forward.without(left_out):
            return self._clock.seconds(lambda: self._forward.hidden(spans, x))


class Tail:
    """Times what output layer and sampler add to a step of the last layer."""

    def __init__(self, executor: Executor, clock: Clock) -> None:
        self._executor = executor
        self._clock = clock

    def measure(self) -> tuple[Points, float]:
        """Returns the seconds that sampled rows add, by their number, and those that a prompt's row
        adds, which may be below 0: the last layer leaves out most of what is not sampled. Noise
        below 0 counts as 0."""
        budget = self._executor.token_budget
        added = {rows: self._added_s(rows, length=1) for rows in SAMPLED if rows <= budget}
        sampled = tuple((rows, max(0.0, added_s)) for rows, added_s in added.items())
        return sampled, (self._added_s(1, length=budget) - added[1]) / budget

    def _added_s(self, sequences: int, length: int) -> float:
        """Returns the time of a step that samples after the last row of each sequence."""
        executor = self._executor
        num = blocks_for(length)
        blocks = [_blocks(index, num) for index in range(sequences)]
        opened = tuple(
            Open(
                seq=index,
                ids=(0,) * length,
                num_prompt=length,
                params=SamplingParams(),
                seed=0,
                num_blocks=num,
            )
            for index in range(sequences)
        )
        rows = tuple(
            Row(index, 0, length, (), tuple(own), True) for index, own in enumerate(blocks)
        )
        plan = StepPlan(0, opened, rows, tuple(range(sequences)))
        spans = [Span(start=0, length=length, blocks=own) for own in blocks]
        x = executor.forward.random_inputs(sequences * length, torch.Generator().manual_seed(0))
        whole_s = self._clock.seconds(lambda: executor.run(plan, x))
        return whole_s - self._clock.seconds(
            torch.inference_mode()(lambda: executor.forward.hidden(spans, x))
        )


def _decodes(num_rows: int, before: int) -> list[Span]:
    """Returns one row of each of `num_rows` sequences, with `before` tokens before it."""
    num = blocks_for(before + 1)
    return [Span(start=before, length=1, blocks=_blocks(index, num)) for index in range(num_rows)]


def _chunk(start: int, length: int) -> list[Span]:
    """Rows of one prompt."""
    return [Span(start=start, length=length, blocks=_blocks(0, blocks_for(start + length)))]


def _blocks(index: int, num: int) -> list[int]:
    """Those of one sequence: no two read the same KV, which a cache would hold."""
    return list(range(index * num, (index + 1) * num))


def profile(
    settings: StageSettings, device: Device, *, fresh: bool, together: bool
) -> DeviceProfile:
    """Returns the profile of these settings' model on a device of this process, known or measured.

    `fresh`: measured anyway. `together`: for a plan; prints `ready`, then waits for a line on
    standard input, so that devices are timed side by side, as they will work. What was measured
    while others used the device is measured again. Raises what `Executor.load` raises.
    """
    device.enter_thread()
    info = ModelInfo.read(settings.model, settings.model_revision)
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
        self._first = FirstLayers(first, model, Clock(device))
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
        kv_numbers = sum(self._model.layers[number].kv_numbers for number in layers)
        limits = Limits(
            # More than counted: stored values are padded.
            kv_bytes=2 * num_tokens * kv_numbers * KV_BYTES[settings.dtype],
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
                cpu_parts=parse_parts(settings.cpu_parts), products=settings.gpu_products
            ),
        )

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
    dtype = "bfloat16" if settings.dtype == "int8" else settings.dtype
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
    sizes = accumulate(kind.num_weights * WEIGHT_BYTES[dtype] for kind in model.layers)
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
        help="say `ready` when loaded, and begin at a line on standard input",
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
