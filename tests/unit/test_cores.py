"""Names of sets of cores."""

from __future__ import annotations

import pytest

from shardline.base.errors import Invalid
from shardline_server.host.cores import parse_cores, show_cores


@pytest.mark.parametrize(
    ("name", "cores"),
    [
        ("cpu:0", (0,)),
        ("cpu:0-3", (0, 1, 2, 3)),
        ("cpu:0,2", (0, 2)),
        ("cpu:4-5,0,4", (0, 4, 5)),
    ],
)
def test_a_device_name_gives_its_cores(name: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(name) == cores


@pytest.mark.parametrize(
    "name",
    [
        "",
        "cpu",
        "cpu:",
        "cpu:a",
        "cpu:3-1",
        "cpu:0,,1",
        "gpu:0",
        "cuda",
        "0-3",
        "cpu:-1",
        "cpu:9999",
    ],
)
def test_a_wrong_device_name_names_the_forms(name: str) -> None:
    with pytest.raises(Invalid, match=r"SHARDLINE_DEVICE: .*cuda:0") as caught:
        parse_cores(name)

    assert caught.value.field == "SHARDLINE_DEVICE"


def test_runs_of_cores_are_shown_short() -> None:
    assert show_cores((0, 1, 2, 5)) == "0-2,5"
