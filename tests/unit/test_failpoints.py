"""Failpoints: armed by a file, claimed once over all processes, free of charge when off."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardline_server import failpoints
from shardline_server.failpoints import Failpoints, Point, Struck, failpoint, is_struck
from tests.repository import REPOSITORY

SHARED = REPOSITORY / "shared"
PASS = (
    "from shardline_server.failpoints import Point, failpoint; "
    "failpoint(Point.MID_DECODE, place=1); print('lives')"
)


def arm(folder: Path, name: str = Point.MID_DECODE, **says: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps({"action": "nan", **says}))
    return path


def test_passing_a_point_without_a_folder_does_nothing() -> None:
    assert failpoints.ARMED is None
    failpoint(Point.MID_DECODE, place=0)
    assert not is_struck(Point.NAN_LOGITS, "nan")


def test_an_armed_point_strikes_once_and_leaves_a_mark(tmp_path: Path) -> None:
    path = arm(tmp_path)
    points = Failpoints(tmp_path)
    assert [points.take(Point.MID_DECODE, {}), points.take(Point.MID_DECODE, {})] == ["nan", None]
    assert not path.exists()
    assert len(list(tmp_path.glob(f"{Point.MID_DECODE}.*.struck"))) == 1


@pytest.mark.parametrize(
    ("when", "strikes"),
    [
        ({"place": 1}, True),
        ({"place": 0}, False),
        ({"seed": 7}, True),
        ({"seed": 8}, False),
        ({"door": "sql"}, False),
    ],
)
def test_a_point_stays_armed_while_its_conditions_differ(
    when: dict[str, int | str], strikes: bool, tmp_path: Path
) -> None:
    path = arm(tmp_path, when=when)
    action = Failpoints(tmp_path).take(Point.MID_DECODE, {"place": 1, "seed": [6, 7]})
    assert (action == "nan", path.exists()) == (strikes, not strikes)


def test_a_point_strikes_as_often_as_armed(tmp_path: Path) -> None:
    arm(tmp_path, times=3)
    points = Failpoints(tmp_path)
    assert [points.take(Point.MID_DECODE, {}) for _ in range(5)] == [
        "nan",
        "nan",
        "nan",
        None,
        None,
    ]


def test_a_point_armed_without_end_strikes_every_time(tmp_path: Path) -> None:
    path = arm(tmp_path, times=None)
    points = Failpoints(tmp_path)
    assert [points.take(Point.MID_DECODE, {}) for _ in range(5)] == ["nan"] * 5
    assert path.exists()
    assert len(list(tmp_path.glob("*.struck"))) == 5


def test_one_of_many_claimants_wins_a_point(tmp_path: Path) -> None:
    arm(tmp_path)
    points = [Failpoints(tmp_path) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        actions = list(threads.map(lambda each: each.take(Point.MID_DECODE, {}), points))
    assert sorted(filter(None, actions)) == ["nan"]


def test_the_action_raise_raises(tmp_path: Path) -> None:
    arm(tmp_path, action="raise")
    with pytest.raises(Struck, match=Point.MID_DECODE):
        Failpoints(tmp_path).take(Point.MID_DECODE, {})


@pytest.mark.parametrize(
    "says", [{"action": "burn"}, {"pause_s": 10_000}, {"times": 0}, {"place": 1}]
)
def test_a_failpoint_file_of_nonsense_is_refused(says: dict[str, Any], tmp_path: Path) -> None:
    arm(tmp_path, **says)
    with pytest.raises(msgspec.ValidationError):
        Failpoints(tmp_path).take(Point.MID_DECODE, {})


@pytest.mark.parametrize(("place", "status"), [(1, -signal.SIGKILL), (2, 0)])
def test_a_failpoint_set_by_the_environment_kills_the_process(
    place: int, status: int, tmp_path: Path
) -> None:
    arm(tmp_path, action="kill", when={"place": place})
    env = {**os.environ, "PYTHONPATH": str(SHARED), "SHARDLINE_FAILPOINTS": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", PASS], env=env, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (status, "lives\n" if status == 0 else "")
