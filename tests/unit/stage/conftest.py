"""Triton's interpreter for the stage's tests: what it computes with numpy keeps a row's bits on
every machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@pytest.fixture(autouse=True, scope="session")
def _products_in_one_order() -> Iterator[None]:
    """The interpreter's products sum in one order: a test of bits then proves the kernel, not the
    library that numpy multiplies with, whose sums depend on the place of a row in the tile
    (OpenBLAS' for AVX2)."""
    with pytest.MonkeyPatch.context() as patch:
        if "SHARDLINE_TEST_DEVICE" not in os.environ:
            patch.setattr(InterpreterBuilder, "create_dot", _create_dot)
        yield


def _create_dot(
    _: InterpreterBuilder, a: Any, b: Any, sums: Any, *_precision: object
) -> TensorHandle:
    """Returns sums [M, N] + a [M, K] @ b [K, N] in the dtype of `sums`, one input after the
    other."""
    left = a.data.astype(sums.data.dtype)
    right = b.data.astype(sums.data.dtype)
    product = np.zeros_like(sums.data)
    with np.errstate(invalid="ignore", over="ignore"):
        for place in range(left.shape[1]):
            product += left[:, place, None] * right[place]
        return TensorHandle(product + sums.data, sums.dtype.scalar)
