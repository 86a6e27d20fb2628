"""What control groups allow, read from files as the kernel writes them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from shardline_server.host import cgroup

VERSION_1 = {
    "cpuset/cpuset.effective_cpus": "1,3\n",
    "cpu/cpu.cfs_quota_us": "250000\n",
    "cpu/cpu.cfs_period_us": "100000\n",
    "memory/memory.limit_in_bytes": f"{3 << 20}\n",
    "memory/memory.usage_in_bytes": f"{2 << 20}\n",
    "memory/memory.stat": f"cache 7\ninactive_file {1 << 19}\n",
}
VERSION_2 = {
    "cpuset.cpus.effective": "1,3\n",
    "cpu.max": "250000 100000\n",
    "memory.max": f"{3 << 20}\n",
    "memory.current": f"{2 << 20}\n",
    "memory.stat": f"anon 7\ninactive_file {1 << 19}\n",
}
MEMBER_OF_VERSION_1 = "4:memory:{0}\n3:cpuset:{0}\n2:cpu,cpuacct:{0}\n0::/\n"
MEMBER_OF_VERSION_2 = "0::{0}\n"


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a test writes the groups."""
    monkeypatch.setattr(cgroup, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(cgroup, "MEMBERSHIP", tmp_path / "membership")
    return tmp_path


def write(groups: Path, membership: str, files: dict[str, str]) -> None:
    """The group of this process, and files of any."""
    (groups / "membership").write_text(membership)
    for name, content in files.items():
        path = groups / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@pytest.mark.parametrize(
    ("membership", "path", "files"),
    [
        (MEMBER_OF_VERSION_2, "/", VERSION_2),
        (MEMBER_OF_VERSION_1, "/", VERSION_1),
        (MEMBER_OF_VERSION_1, "/docker/of-the-host", VERSION_1),
    ],
    ids=["version 2", "version 1", "version 1 of an older engine"],
)
def test_a_containers_group_is_the_root(
    groups: Path, membership: str, path: str, files: dict[str, str]
) -> None:
    write(groups, membership.format(path), files)
    assert cgroup.cpuset() == (1, 3)
    assert cgroup.cpu_quota() == 2.5
    assert cgroup.memory_limit() == 3 << 20
    assert cgroup.memory_left() == (1 << 20) + (1 << 19)
    assert cgroup.memory_group() != 0


def test_every_group_around_a_service_limits_it(groups: Path) -> None:
    own, around = "system.slice/shardline.service", "system.slice"
    files = {
        f"{own}/cpu.max": "max 100000\n",
        f"{around}/cpu.max": "300000 100000\n",
        f"{own}/memory.max": "max\n",
        f"{own}/memory.current": "5\n",
        f"{own}/memory.stat": "inactive_file 0\n",
        f"{around}/memory.max": "100\n",
        f"{around}/memory.current": "70\n",
        f"{around}/memory.stat": "inactive_file 10\n",
        "cpuset.cpus.effective": "0-3\n",
    }
    write(groups, MEMBER_OF_VERSION_2.format(f"/{own}"), files)
    assert (cgroup.cpu_quota(), cgroup.memory_limit(), cgroup.memory_left()) == (3.0, 100, 40)
    assert cgroup.cpuset() == (0, 1, 2, 3)
    shared = groups / "cgroup" / around
    assert cgroup.memory_group() == shared.stat().st_ino, "other services share its limit"


@pytest.mark.parametrize("membership", ["", "0::/\n", "2:cpu:/\n"])
def test_without_a_limit_there_is_none(groups: Path, membership: str) -> None:
    files = {"cpu.max": "max 100000\n", "cpu/cpu.cfs_quota_us": "-1\n", "memory.max": "max\n"}
    write(groups, membership, files)
    assert (cgroup.cpu_quota(), cgroup.cpuset()) == (math.inf, ())
    assert cgroup.memory_limit() == cgroup.memory_left() == cgroup.UNLIMITED
    assert cgroup.within_quota([0, 1, 4]) == (0, 1, 4)


def test_without_cgroups_nothing_is_limited(groups: Path) -> None:
    assert (cgroup.cpu_quota(), cgroup.memory_left(), cgroup.memory_group()) == (
        math.inf,
        cgroup.UNLIMITED,
        0,
    )


@pytest.mark.parametrize(("quota", "num"), [(0.3, 1), (1.9, 1), (2.0, 2), (3.5, 3), (64.0, 8)])
def test_cores_are_neighbors_and_as_many_as_the_quota_pays_for(
    monkeypatch: pytest.MonkeyPatch, quota: float, num: int
) -> None:
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: quota)
    chosen = set()
    for name in range(64):
        monkeypatch.setattr("socket.gethostname", lambda name=name: f"container-{name}")
        cores = cgroup.within_quota(range(8))
        assert (len(cores), cores) == (num, tuple(range(cores[0], cores[0] + num)))
        chosen.add(cores)
    assert len(chosen) == 8 // num, "containers spread"
