"""Whole numbers, rounded up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardline.base.rounding import ceil_div, round_up


@given(st.integers(0, 2**40), st.integers(1, 2**20))
def test_given_two_numbers_when_divided_then_the_quotient_is_the_least_enough(
    number: int, divisor: int
) -> None:
    quotient = ceil_div(number, divisor)

    assert (quotient - 1) * divisor < number <= quotient * divisor
    assert round_up(number, divisor) == quotient * divisor
