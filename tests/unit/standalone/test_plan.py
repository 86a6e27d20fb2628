"""The processes of a stack: who gets which setting, and that no password stands on a command
line."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.standalone.placement import places
from services.standalone.plan import (
    Addresses,
    ServiceProcess,
    StackPlan,
    make_plan,
    make_warm_parent,
    new_password,
)
from services.standalone.preload import preload
from services.standalone.settings import StandaloneSettings
from shardline_server.host.threads import SPIN_COUNT

ADDRESSES = Addresses(
    http_port=8001,
    flower_port=5556,
    flower_password="secret-of-flower",
    api_key="secret-of-gateway",
    database="postgresql://user:secret-of-postgres@db/shardline",
    redis="redis://:secret-of-redis@cache/0",
)


def plan(tmp_path: Path, *, stages: int = 2, replicas: int = 1, libraries: str = "") -> StackPlan:
    settings = StandaloneSettings(model=str(tmp_path), stages=stages, replicas=replicas)
    parent = make_warm_parent(settings, tmp_path, libraries)
    return make_plan(
        settings, ADDRESSES, places(settings, 8, list(range(stages * replicas))), tmp_path, parent
    )


def every(made: StackPlan) -> list[ServiceProcess]:
    return [*made.stages, *made.doors]


def test_no_secret_is_on_a_command_line(tmp_path: Path) -> None:
    for service in every(plan(tmp_path)):
        assert "secret" not in " ".join(service.argv)


def test_every_service_knows_the_servers(tmp_path: Path) -> None:
    for service in every(plan(tmp_path)):
        assert service.env["SHARDLINE_DATABASE_URL"] == ADDRESSES.database
        assert service.env["SHARDLINE_REDIS_URL"] == ADDRESSES.redis


def test_planned_stages_know_their_layers_and_pipelines_differ(tmp_path: Path) -> None:
    made = plan(tmp_path, replicas=2)
    stages = {service.name: service.env for service in (*made.heads, *made.others)}
    assert [stages[name]["SHARDLINE_LAYERS"] for name in ("stage-0", "stage-1")] == ["0-3", "4-7"]
    assert len({stages[name]["SHARDLINE_PIPELINE"] for name in ("stage-0", "stage-0.1")}) == 2
    assert {stages[name]["SHARDLINE_MODEL_NAME"] for name in stages} == {tmp_path.name}


def test_a_stop_closes_the_door_first_and_drains_heads_before_their_stages(tmp_path: Path) -> None:
    names = [[service.name for service in group] for group in plan(tmp_path).stop_order]
    assert names == [["gateway"], ["stage-0"], ["stage-1", "relay", "flower"]]


def test_flower_settings_of_the_shell_do_not_drop_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWER_UNAUTHENTICATED_API", "true")
    env = plan(tmp_path).flower.env
    assert "FLOWER_UNAUTHENTICATED_API" not in env
    assert env["FLOWER_BASIC_AUTH"].endswith(":secret-of-flower")
    assert env["FLOWER_ADDRESS"] == "127.0.0.1"


def test_only_stages_preload_a_library(tmp_path: Path) -> None:
    settings = StandaloneSettings(model=str(tmp_path), stage_preload="liballocator.so")
    parent = make_warm_parent(settings, tmp_path, preload(settings))
    made = make_plan(settings, ADDRESSES, places(settings, 8, [0, 1]), tmp_path, parent)
    assert parent.environment["LD_PRELOAD"] == "liballocator.so", "or no stage could be its fork"
    assert [
        each.name for each in every(made) if each.env.get("LD_PRELOAD") == "liballocator.so"
    ] == [
        "stage-0",
        "stage-1",
    ]
    assert preload(StandaloneSettings(stage_preload="")) == ""


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment does not say how threads wait."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize(
    ("cores", "waiting"),
    [
        ([0], {"OMP_WAIT_POLICY": "passive"}),
        ([0, 1], {"GOMP_SPINCOUNT": str(SPIN_COUNT)}),
    ],
)
def test_threads_of_stages_that_share_cores_wait_asleep_also_in_forks(
    tmp_path: Path, cores: list[int], waiting: dict[str, str]
) -> None:
    settings = StandaloneSettings(model=str(tmp_path), stages=2)
    stages = places(settings, 8, cores)
    parent = make_warm_parent(settings, tmp_path, "", stages)
    for stage in make_plan(settings, ADDRESSES, stages, tmp_path, parent).stages:
        assert stage.env.items() >= waiting.items()
        assert parent.suits(stage.env)


@pytest.mark.usefixtures("unset")
def test_how_threads_wait_is_left_to_who_sets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    parent = make_warm_parent(StandaloneSettings(model=str(tmp_path)), tmp_path, "")
    assert "GOMP_SPINCOUNT" not in parent.environment


def test_no_password_breaks_a_url_or_flowers_list() -> None:
    assert not any(set(",:@/ ") & set(new_password()) for _ in range(200))


def test_several_stages_on_one_host_divide_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = {
        num: [float(service.env["SHARDLINE_KV_SHARE"]) for service in (*made.heads, *made.others)]
        for num in (1, 2, 4)
        for made in (plan(tmp_path, stages=num),)
    }
    assert [sum(share) for share in shares.values()] == pytest.approx([0.4, 0.6, 0.6])

    monkeypatch.setenv("SHARDLINE_KV_SHARE", "0.05")
    assert plan(tmp_path).heads[0].env["SHARDLINE_KV_SHARE"] == "0.05", "who sets it is asked"


def test_every_planned_stage_may_be_forked_unless_a_library_would_read_another_value(
    tmp_path: Path,
) -> None:
    parent = make_warm_parent(StandaloneSettings(model=str(tmp_path)), tmp_path, "liballocator.so")
    for stage in plan(tmp_path, libraries="liballocator.so").stages:
        assert parent.suits(stage.env)
        assert parent.suits({**stage.env, "SHARDLINE_TOKEN_BUDGET": "64"})
        assert not parent.suits({**stage.env, "OMP_NUM_THREADS": "3"})
        assert not parent.suits(
            {name: value for name, value in stage.env.items() if name != "LD_PRELOAD"}
        )


def test_each_process_has_a_metrics_port_of_its_own_where_one_is_asked_for(tmp_path: Path) -> None:
    settings = StandaloneSettings(stages=2, metrics_port=9200)
    parent = make_warm_parent(settings, tmp_path, "")
    made = make_plan(settings, ADDRESSES, places(settings, 8, [0, 1]), tmp_path, parent)
    ports = {each["labels"]["service"]: each["targets"] for each in made.scrape_targets}
    assert ports == {
        "gateway": ["127.0.0.1:9200"],
        "relay": ["127.0.0.1:9201"],
        **{stage.name: [f"127.0.0.1:{port}"] for port, stage in enumerate(made.stages, 9202)},
    }
    assert plan(tmp_path).scrape_targets == []
