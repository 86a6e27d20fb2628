"""Activations as bytes of frames and back: as they are, and as int8 with a scale for each row."""

from __future__ import annotations

from uuid import UUID

import pytest
import torch
from torch import Tensor

from services.stage.engine.tensors import INT8_MAX, name_of, quantized, tensor_of, view_of
from services.stage.hop import Frame, Kind
from shardline.base.errors import ProtocolError

HIDDEN = 48
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def frame_of(states: Tensor, shape: tuple[int, ...] | None = None) -> Frame:
    return Frame(
        kind=Kind.PLAN,
        pipeline=UUID(int=1),
        epoch=1,
        step=0,
        message=b"",
        tensor=view_of(states),
        dtype=name_of(states.dtype),
        shape=tuple(states.shape) if shape is None else shape,
    )


def rows(num: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very unlike size."""
    states = torch.randn(num, HIDDEN, generator=torch.Generator().manual_seed(num))
    return (states * 10.0 ** (torch.arange(num)[:, None] % 6 - 3)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounded_activations_are_off_by_half_a_unit_of_their_row(dtype: torch.dtype) -> None:
    states = rows(20, dtype)
    received = tensor_of(frame_of(quantized(states)), dtype)
    unit = states.float().abs().amax(dim=1, keepdim=True) / INT8_MAX
    slack = 1.01 + 2 * INT8_MAX * torch.finfo(dtype).eps
    assert received.dtype == dtype
    assert bool(((received.float() - states.float()).abs() <= slack * unit / 2).all())


def test_a_frame_of_int8_has_a_byte_for_each_value_and_four_for_each_row() -> None:
    assert [quantized(rows(num, torch.bfloat16)).nbytes for num in (0, 1, 5)] == [
        0,
        HIDDEN + 4,
        5 * (HIDDEN + 4),
    ]


def test_the_bytes_of_a_row_depend_on_that_row_only() -> None:
    states = rows(33)
    together = quantized(states)
    alone = torch.cat([quantized(row[None]) for row in states])
    assert torch.equal(together, alone)


def test_rows_of_zeros_and_of_tiny_values_come_back() -> None:
    states = torch.zeros(3, HIDDEN)
    states[1, 5], states[2] = -1e-45, torch.finfo(torch.float32).tiny
    received = tensor_of(frame_of(quantized(states)), torch.float32)
    assert torch.equal(received[:2], torch.zeros(2, HIDDEN))
    assert bool((received[2] - states[2]).abs().max() <= states[2].max() / INT8_MAX)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_stays_so_and_spoils_no_other(value: float) -> None:
    states = rows(3)
    clean = tensor_of(frame_of(quantized(states)), torch.float32)
    states[1, 7] = value
    received = tensor_of(frame_of(quantized(states)), torch.float32)
    assert not bool(received[1].isfinite().any())
    assert torch.equal(received[[0, 2]], clean[[0, 2]])


def test_activations_go_into_the_buffer_that_is_given() -> None:
    states = rows(4, torch.bfloat16)
    buffer = torch.zeros(4096, dtype=torch.uint8)
    received = tensor_of(frame_of(quantized(states)), torch.bfloat16, buffer)
    assert received.data_ptr() == buffer.data_ptr()
    assert torch.equal(received, tensor_of(frame_of(quantized(states)), torch.bfloat16))


@pytest.mark.parametrize(
    ("states", "shape", "problem"),
    [
        (torch.zeros(6, 4, dtype=torch.int8), (6, 4), "rows of values and a scale"),
        (torch.zeros(64, dtype=torch.int8), (64,), "rows of values and a scale"),
        (torch.zeros(64, dtype=torch.int8), (2, 4, 8), "rows of values and a scale"),
        (
            torch.zeros(4, HIDDEN, dtype=torch.float16),
            (4, HIDDEN),
            "activations of bfloat16 are needed",
        ),
        (torch.zeros(4, 8192, dtype=torch.int8), (4, 8192), "has 4096 at most"),
    ],
    ids=["no values", "no rows", "three dimensions", "another dtype", "more than a step"],
)
def test_activations_of_another_form_are_refused(
    states: Tensor, shape: tuple[int, ...], problem: str
) -> None:
    with pytest.raises(ProtocolError, match=problem):
        tensor_of(frame_of(states, shape), torch.bfloat16, torch.zeros(4096, dtype=torch.uint8))
