"""The stages of a bare engine: how each loads its layers, is wired to the others by hand, and tells
what it did with its time."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, Self
from uuid import UUID

import structlog

from services.stage.device.accelerator import MODULE_FIELD, load_module
from services.stage.device.acquire import acquire
from services.stage.engine.accelerator_options import AcceleratorOptions
from services.stage.engine.engine import Engine, FollowerEngine
from services.stage.engine.executor import Executor
from services.stage.engine.memory import Limits
from services.stage.hop import Channel, Hop, Kind, Receiver, Sender
from services.stage.hop.sockets import Sockets
from services.stage.hop.wiring import Wiring
from services.stage.hop.zeromq import ZeroMqHop
from services.stage.model.model_info import ModelInfo
from services.stage.settings import StageSettings
from shardline.base.config import Times
from shardline.contract.fleet.lanes import MAX_LANES
from shardline.contract.fleet.split import even_split, parse_split
from shardline_scheduler.step_times import bubble_share
from shardline_server.host.threads import run_in_fresh_thread
from tests.chaos.network.proxy import Proxy

CONNECT_S = 60.0


def log_to_stderr() -> None:
    """Stdout is the figures' alone: processes that end at the same time write lines into each
    other."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


class Spent(NamedTuple):
    """What a stage did with its time."""

    compute_s: float
    hop_s: float
    wait_s: float

    @classmethod
    def of(cls, engine: Engine) -> Self:
        """So far."""
        return cls(engine.progress.compute_s, engine.progress.hop_s, engine.progress.wait_s)

    def since(self, then: Spent) -> Spent:
        """Since that moment."""
        return Spent(*(mine - its for mine, its in zip(self, then, strict=True)))

    @property
    def bubble_share(self) -> float:
        """Of this time."""
        return bubble_share(*self)


def serve_later(
    pipe: Connection, folder: Path, options: argparse.Namespace, stage_index: int, identity: UUID
) -> None:
    """A later stage's process: load, bind, connect, run and answer the head's process until
    killed."""
    log_to_stderr()
    num_stages = len(options.device)
    executor = run_in_fresh_thread(partial(load, options, stage_index, folder))
    pipe.send((executor.num_blocks, executor.offload, executor.num_states))
    delay_s = options.hop_delay_ms / 1e3
    hop = hop_in(folder, delay_s)
    receiver = hop.open_receiver(channel(identity, Kind.PLAN))
    pipe.send(receiver.address)
    address, num_blocks = pipe.recv()
    kind = Kind.RESULT if stage_index == num_stages - 1 else Kind.PLAN
    sender = hop.open_sender(channel(identity, kind), delayed(address, delay_s), CONNECT_S)
    engine: Engine = FollowerEngine(executor, on_lost=abort, name=f"stage-{stage_index}")
    ours = wiring(
        identity,
        stage_index=stage_index,
        num_stages=num_stages,
        num_blocks=num_blocks,
        receiver=receiver,
        sender=sender,
    )
    engine.wire(replace(ours, sends_int8=options.hop_activations == "int8"))
    engine.start()
    while pipe.recv():
        pipe.send(Spent.of(engine))


def load(options: argparse.Namespace, stage_index: int, folder: Path) -> Executor:
    """The executor of one stage, on its device, locked as in production."""
    load_module(os.environ.get(MODULE_FIELD))
    name = options.device[stage_index]
    worker = f"bare-{stage_index}"
    device = acquire(
        name, worker=worker, lock_folder=folder / "locks", shared=options.device.count(name) > 1
    )
    info = ModelInfo.read(options.model)
    return Executor.load(
        model=info,
        layers=split_of(options, info)[stage_index],
        device=device,
        dtype=dtype_of(options, stage_index),
        limits=Limits(
            kv_bytes=options.kv_bytes,
            offload_bytes=options.kv_offload_mib << 20,
            offload_folder=options.kv_offload_dir,
            token_budget=options.token_budget,
            max_open=2 * options.seats,
        ),
        cache_folder=StageSettings.model_fields["cache_dir"].default,
        on_accelerator=AcceleratorOptions(
            products=options.gpu_products, cuda_graphs=options.cuda_graphs
        ),
    )


def dtype_of(options: argparse.Namespace, stage_index: int) -> str:
    """The dtype of one stage."""
    dtypes = options.dtype or ["float32"]
    return str(dtypes[stage_index if len(dtypes) > 1 else 0])


@contextmanager
def environment_of(options: argparse.Namespace, stage_index: int) -> Iterator[None]:
    """While entered, what a process inherits that is started for this stage."""
    before = dict(os.environ)
    prefix = f"{stage_index}:"
    try:
        for text in options.env:
            if text.startswith(prefix):
                name, value = text.removeprefix(prefix).split("=", 1)
                os.environ.pop(name, None) if not value else os.environ.update({name: value})
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def split_of(options: argparse.Namespace, info: ModelInfo) -> list[range]:
    """The layers of each stage."""
    if options.split:
        return parse_split(options.split, info.num_layers)
    return even_split(info.num_layers, len(options.device))


def hop_in(folder: Path, delay_s: float) -> Hop:
    """Over ipc, as two stages of one host use it; a proxy needs tcp."""
    return ZeroMqHop(Sockets(bind="tcp://127.0.0.1" if delay_s else f"ipc://{folder}"), Times())


def delayed(address: str, delay_s: float) -> str:
    """The address of a proxy in this process, behind which is this one."""
    if not delay_s:
        return address
    host, port = address.removeprefix("tcp://").split(":")
    proxy = Proxy((host, int(port)))
    proxy.start()
    proxy.delay(delay_s)
    return f"tcp://{proxy.host}:{proxy.port}"


def channel(pipeline: UUID, kind: Kind) -> Channel:
    """Epoch 1 of a pipeline."""
    return Channel(pipeline=pipeline, epoch=1, kind=kind, num_lanes=MAX_LANES)


def wiring(
    pipeline: UUID,
    *,
    stage_index: int,
    num_stages: int,
    num_blocks: int,
    receiver: Receiver | None,
    sender: Sender | None,
) -> Wiring:
    """As the control links would make it."""
    return Wiring(
        pipeline=pipeline,
        epoch=1,
        stage_index=stage_index,
        num_stages=num_stages,
        num_lanes=MAX_LANES,
        num_blocks=num_blocks,
        receiver=receiver,
        sender=sender,
    )


def abort(epoch: int, reason: str) -> None:
    """Ends the process of a stage whose pipeline broke."""
    print(f"bare pipeline broken in epoch {epoch}: {reason}", file=sys.stderr)
    os._exit(1)
