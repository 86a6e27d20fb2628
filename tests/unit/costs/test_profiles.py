"""Profiles that no device has: the planner refuses them by name, and raises nothing else."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.base.errors import Invalid
from shardline_costs import LayerTimes, Link, Workload, profile_of, read_profiles
from shardline_fleet.deployment.fleet_planner import FleetPlanner
from shardline_fleet.deployment.scaling import Scaling
from shardline_fleet.planner import make_plans
from tests.unit.fleet.planner.fleets import device, model

NO_TIME = LayerTimes(rows=((1, 0.0), (64, 0.0)), decode_context_s=0.0, prefill_context_s=0.0)
numbers = st.sampled_from([0.0, -1.0, 1e-300, 1e-12, 1.0, 1e6, 1e300, float("inf"), float("nan")])
points = st.lists(st.tuples(numbers, numbers), max_size=3).map(tuple)
layers = st.builds(LayerTimes, rows=points, decode_context_s=numbers, prefill_context_s=numbers)
links = st.dictionaries(
    st.sampled_from(["", "a", "b"]), st.builds(Link, latency_s=numbers, bytes_per_s=numbers)
)
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["float32", "int8", "float8"]),
        "ranks": st.sampled_from([1, 0]),
        "memory_bytes": st.sampled_from([0, -1, 1 << 30, 1 << 200]),
        "layers": st.dictionaries(st.just("full_attention"), layers),
        "step": points,
        "sampled": points,
        "tail_prefill_row_s": numbers,
        "frame_s": numbers,
        "frame_byte_s": numbers,
        "stream_bytes_per_s": numbers,
        "machine": st.sampled_from(["a", "b"]),
        "links": links,
    },
)


@settings(max_examples=300)
@given(changes=st.lists(CHANGES, min_size=1, max_size=3))
def test_only_invalid_is_raised_whatever_is_measured(changes: list[dict[str, Any]]) -> None:
    costs = model(6)
    load = Workload(concurrency=4)
    profiles = [
        msgspec.structs.replace(device(f"a:{place}"), **each) for place, each in enumerate(changes)
    ]
    named = {profile.device: profile for profile in profiles}
    with suppress(Invalid):
        make_plans(costs, profiles, load)
    with suppress(Invalid):
        FleetPlanner(costs, named, load).replan(None, may_improve=True)
    with suppress(Invalid):
        Scaling(costs, profiles, load).size(2, 10.0)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layers": {"full_attention": NO_TIME}}, "a:0: layers of full_attention take no time"),
        ({"layers": {}}, "a:0: its layers take no time"),
        (
            {"step": ((4.0, 1.0), (4.0, 2.0))},
            "a:0 has times of steps that are not in order of rows",
        ),
        ({"frame_s": float("nan")}, "frame_s"),
        ({"memory_bytes": 1 << 200}, "no device profile"),
        ({"dtype": "float8"}, "a:0 has weights of 'float8'"),
        ({"version": 2}, "version 2 of a profile"),
    ],
)
def test_a_profile_that_no_device_has_is_refused_by_name(
    changes: dict[str, Any], problem: str
) -> None:
    profile = msgspec.structs.replace(device("a:0"), **changes)
    with pytest.raises(Invalid, match=problem):
        make_plans(model(), [device("b:0"), profile], Workload())
    with pytest.raises(Invalid, match=problem):
        profile_of(msgspec.to_builtins(profile), "profile of a")


@pytest.mark.parametrize("document", [b"", b"{}", b"[1]", b'"no"', b'{"device": "cpu"}'])
def test_what_is_no_profile_is_refused(document: bytes) -> None:
    with pytest.raises(Invalid, match="no device profile"):
        read_profiles(document)
