"""Layers → stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.base.errors import Invalid
from shardline.contract.split import even_split, parse_split


@given(st.integers(1, 200), st.data())
def test_an_even_split_covers_every_layer_once_and_differs_by_one_at_most(
    num_layers: int, data: st.DataObject
) -> None:
    stages = even_split(num_layers, data.draw(st.integers(1, num_layers)))

    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


@pytest.mark.parametrize("num_stages", [0, 9])
def test_a_stage_without_a_layer_is_refused(num_stages: int) -> None:
    with pytest.raises(Invalid, match="SHARDLINE_STAGES"):
        even_split(8, num_stages)


def test_a_split_by_hand_counts_as_people_count() -> None:
    assert parse_split("0-5, 6,7", 8) == [range(6), range(6, 7), range(7, 8)]


@pytest.mark.parametrize(
    "text", ["", "0-5", "0-5,7", "1-7", "0-5,5-7", "0-8", "a-b", "5-0,6-7", "0-5;6-7"]
)
def test_a_split_that_does_not_cover_every_layer_once_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="SHARDLINE_SPLIT"):
        parse_split(text, 8)
