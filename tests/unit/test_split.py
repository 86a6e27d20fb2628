"""Layers → stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.base.errors import Invalid
from shardline.contract.fleet.joined_layers import joined_layers
from shardline.contract.fleet.split import even_split, parse_split, split_of


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


SHARED = {
    "num_hidden_layers": 8,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]
    * 2,
}
OF_THEIR_OWN = {"num_hidden_layers": 8, "hidden_size_per_layer_input": 16}


def test_layers_that_share_keys_stay_with_those_that_have_them() -> None:
    joined = joined_layers({"text_config": SHARED})
    assert joined is not None
    assert joined.layers == range(3, 8)
    assert split_of(None, 8, 2, joined) == [range(3), range(3, 8)]
    assert split_of("even", 8, 4, joined) == [range(1), range(1, 2), range(2, 3), range(3, 8)]
    assert split_of("0-1,2-7", 8, 2, joined) == [range(2), range(2, 8)]
    with pytest.raises(Invalid, match=r"layers 3-7 must stay together, because the last 2 take"):
        split_of("0-3,4-7", 8, 2, joined)
    with pytest.raises(Invalid, match="Use 1 to 4 stages"):
        split_of(None, 8, 5, joined)
    joined.check([range(3), range(3, 8), range(8)], "SHARDLINE_LAYERS")
    for layers in (range(4, 8), range(5), range(4, 5)):
        with pytest.raises(Invalid, match="SHARDLINE_LAYERS"):
            joined.check([layers], "SHARDLINE_LAYERS")


def test_layers_with_embeddings_of_their_own_all_stay_together() -> None:
    joined = joined_layers(OF_THEIR_OWN)
    assert joined is not None
    assert joined.layers == range(8)
    assert split_of(None, 8, 1, joined) == [range(8)]
    with pytest.raises(Invalid, match=r"layers 0-7 must stay together.*Use 1 stage"):
        split_of(None, 8, 2, joined)


def test_other_models_join_no_layers() -> None:
    assert joined_layers({"num_hidden_layers": 8, "num_kv_shared_layers": 0}) is None
    assert joined_layers({"n_layer": 8}) is None
