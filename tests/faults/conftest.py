"""The small stack that the tests of single faults share in one process. Each leaves it whole; it
ends with the last of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.small_stack import MAX_TOKENS, Hurt, small_stack


@pytest.fixture(scope="package")
def hurt() -> Iterator[Hurt]:
    """Only for tests marked `short_leases`."""
    with small_stack() as hurt:
        yield hurt


@pytest.fixture(scope="package")
def undisturbed(hurt: Hurt) -> list[tuple[int, ...]]:
    """The MAX_TOKENS tokens of every request while nobody dies; of fewer tokens it is the
    beginning."""
    return hurt.undisturbed(MAX_TOKENS)
