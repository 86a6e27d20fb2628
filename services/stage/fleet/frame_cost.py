"""Measures what frames cost the processor of a stage: to encode, send, receive, check and copy
them. Knows no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from uuid import UUID

from services.stage.hop import Channel, Frame, Hop, Kind, Receiver, Sender
from services.stage.hop.frame import ITEM_BYTES
from shardline.base.clock import process_s
from shardline.base.errors import LinkLost

RUNS = 16
MESSAGE_BYTES = 4096
"""About what the plan of a full step takes."""
WAIT_S = 5.0
PIPELINE = UUID(int=0)
Shape = tuple[int, int]


def measure_frames(hop: Hop, *, dtype: str, small: Shape, large: Shape) -> tuple[float, float]:
    """Returns seconds of this process for a frame without its bytes, and for each byte: of frames
    with tensors of these two shapes. Raises Unavailable or LinkLost if the hop cannot be opened."""
    steps = count()
    with _pair(hop) as (sender, receiver):

        def seconds(shape: Shape) -> float:
            times = [
                _once_s(sender, receiver, _frame(next(steps), dtype, shape)) for _ in range(RUNS)
            ]
            return statistics.quantiles(times)[0]

        small_s = seconds(small)
        large_s = seconds(large)
    small_bytes, large_bytes = (math.prod(shape) * ITEM_BYTES[dtype] for shape in (small, large))
    byte_s = max(0.0, large_s - small_s) / (large_bytes - small_bytes)
    return max(0.0, small_s - byte_s * small_bytes), byte_s


def _frame(step: int, dtype: str, shape: Shape) -> Frame:
    return Frame(
        kind=Kind.PLAN,
        pipeline=PIPELINE,
        epoch=0,
        step=step,
        message=bytes(MESSAGE_BYTES),
        tensor=memoryview(bytes(math.prod(shape) * ITEM_BYTES[dtype])),
        dtype=dtype,
        shape=shape,
    )


def _once_s(sender: Sender, receiver: Receiver, frame: Frame) -> float:
    began_s = process_s()
    sender.send(frame)
    received = receiver.receive(WAIT_S)
    if received is None or received.tensor is None:
        raise LinkLost(f"a frame of this process did not come back in {WAIT_S:.0f} s")
    bytes(received.tensor)  # a stage copies it, too
    return process_s() - began_s


@contextmanager
def _pair(hop: Hop) -> Iterator[tuple[Sender, Receiver]]:
    """A context with both ends of a link of this process."""
    channel = Channel(pipeline=PIPELINE, epoch=0, kind=Kind.PLAN, num_lanes=1)
    receiver = hop.open_receiver(channel)
    try:
        sender = hop.open_sender(channel, receiver.address, WAIT_S)
        try:
            yield sender, receiver
        finally:
            sender.close()
    finally:
        receiver.close()
