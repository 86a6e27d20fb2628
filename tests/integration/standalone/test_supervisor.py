"""A whole stack as `make up` runs it: ready, true to its record, hard to start twice, gone when
told to go."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import psutil
import psycopg
import pytest
from sqlalchemy import Row, text

from services.standalone.placement import is_preferred
from services.standalone.settings import CLERK
from services.standalone.state_dir import SUPERVISOR
from shardline.client import Client
from shardline.contract.api_key import bearer
from shardline.store.connection.database import connect
from shardline.store.statistics import costs
from shardline_costs import DeviceProfile, ModelCosts, Workload, read_profiles
from shardline_fleet.planner import make_plans
from shardline_server.host.cores import parse_cores
from tests.models import save_model
from tests.polling import until
from tests.stack import ForkedStack, Stack

NAMES = {
    "supervisor",
    "warm-parent",
    "postgres",
    "redis",
    "gateway",
    "relay",
    "stage-0",
    "stage-1",
    "flower",
}

RESTARTED = ("warm-parent", "stage-1")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="shardline-stack-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[Stack]:
    """One stack for the tests that leave it as they found it. Its devices are measured."""
    stack = Stack(
        folder, SHARDLINE_STAGES="2", SHARDLINE_SPLIT="", SHARDLINE_CACHE_DIR=str(folder / "cache")
    )
    stack.start()
    yield stack
    stack.end()
    assert stack.left() == []


@pytest.fixture
def own_stack(tmp_path: Path) -> Iterator[Stack]:
    """A small stack for one test that ends it."""
    stack = ForkedStack(tmp_path, SHARDLINE_STAGES="1")
    stack.start()
    yield stack
    stack.end()


def measured_by(stack: Stack) -> list[DeviceProfile]:
    """What a stack measured of its devices, in their order."""
    profiles = [
        read_profiles(file.read_bytes())[0]
        for file in (stack.home.folder / "cache" / "profiles").iterdir()
    ]
    return sorted(profiles, key=lambda profile: profile.device)


def test_the_record_of_a_ready_stack_is_true(stack: Stack) -> None:
    up = stack.look()
    for secret in (stack.home.up_file, stack.home.folder / "api_key"):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert (up["model"], up["stages"]) == ("clerk", 2)
    assert set(up["processes"]) == NAMES
    assert all(psutil.pid_exists(pid) for pid in up["processes"].values())
    assert up["processes"][SUPERVISOR] == stack.process.pid
    assert httpx.get(f"{up['urls']['gateway']}/ready").status_code == 200
    assert {path.stem for path in (stack.home.folder / "logs").glob("*.log")} >= NAMES - {
        "supervisor"
    }


def test_stages_hold_the_layers_of_the_best_plan_for_their_devices(stack: Stack) -> None:
    profiles = measured_by(stack)
    plan = make_plans(
        ModelCosts.read(CLERK), profiles, Workload(), num_stages=2, replicas=1
    ).best.pipelines[0]
    with psycopg.connect(stack.urls["database"]) as connection:
        ((stages,),) = connection.execute("SELECT stages FROM pipelines").fetchall()
    held = [(stage["device"], stage["layers"]) for stage in stages]
    assert held == [(stage.devices[0].device, [stage.first, stage.stop]) for stage in plan.stages]
    (measured,) = re.findall("measuring (.*), once", stack.output.read_text())
    # Another stack's cores come last.
    assert sorted(measured.split(", ")) == [profile.device for profile in profiles]


def test_without_any_placement_the_best_of_all_plans_runs(tmp_path: Path) -> None:
    stack = ForkedStack(tmp_path, SHARDLINE_SPLIT="", SHARDLINE_CACHE_DIR=str(tmp_path / "cache"))
    stack.start()
    try:
        profiles = measured_by(stack)
        # The shares of the cores, and all of them
        of_all = max(profiles, key=lambda profile: len(parse_cores(profile.device)))
        shares = [profile for profile in profiles if profile is not of_all]
        plan, whole = (
            make_plans(ModelCosts.read(CLERK), each, Workload()).best for each in (shares, [of_all])
        )
        if is_preferred(whole, plan):
            plan = whole
        with psycopg.connect(stack.urls["database"]) as connection:
            rows = connection.execute(
                "SELECT stages FROM pipelines WHERE ready_at IS NOT NULL"
            ).fetchall()
        held = sorted(
            [(stage["device"], *stage["layers"]) for stage in stages] for (stages,) in rows
        )
        assert held == sorted(
            [(stage.devices[number].device, stage.first, stage.stop) for stage in pipeline.stages]
            for pipeline in plan.pipelines
            for number in range(pipeline.replicas)
        )
        assert stack.look()["replicas"] == plan.replicas
        assert f"planned {plan.split}" in stack.output.read_text()
        assert stack.complete().status_code == 200
    finally:
        stack.end()


def test_a_ready_stack_answers(stack: Stack) -> None:
    answer = stack.complete()
    assert answer.status_code == 200
    assert httpx.get(f"{stack.look()['urls']['gateway']}/v1/models").status_code == 401, (
        "nobody without a key"
    )
    assert answer.json()["choices"][0]["text"]


def test_a_prompt_that_begins_like_another_of_its_tenant_is_not_computed_again(
    stack: Stack,
) -> None:
    urls = stack.urls
    prompt = [5 + place % 90 for place in range(150)]
    request = {"model": "clerk", "prompt": prompt, "temperature": 0, "max_tokens": 4}
    with httpx.Client(
        base_url=f"{urls['gateway']}/v1", headers=bearer(urls["api_key"]), timeout=60
    ) as http:
        first, again = (
            http.post("/completions", json=request).raise_for_status().json() for _ in range(2)
        )
    with psycopg.connect(urls["database"]) as connection:
        connection.execute("INSERT INTO tenants (id) VALUES ('another')")
    with Client(database_url=urls["database"], redis_url=urls["redis"]) as client:
        job_id = client.submit("clerk", prompt, temperature=0, max_tokens=4, tenant="another")
        of_another = client.wait(job_id, timeout_s=60)

    assert [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (first, again)] == [
        0,
        128,
    ]
    assert of_another.result is not None
    assert of_another.result.usage.cached_tokens == 0
    assert first["choices"] == again["choices"]
    assert of_another.result.text == first["choices"][0]["text"]


def test_jobs_share_what_both_stages_took(stack: Stack) -> None:
    assert stack.complete().status_code == 200
    engine = connect(stack.urls["database"])
    totals = text("""
        SELECT sum(energy_j) AS jobs_j, min(energy_j) AS least_j, sum(num_unknown) AS num_unknown,
            (SELECT sum(energy_j) FROM pipeline_energy) AS pipelines_j,
            (SELECT string_agg(DISTINCT source, ',') FROM pipeline_energy) AS sources
        FROM job_costs
    """)

    def measured() -> Row[Any] | None:
        with engine.begin() as connection:
            found = connection.execute(totals).one()
        # A head writes an epoch's energy with each heartbeat, and the end of a job at once.
        is_written = found.num_unknown == 0 and found.jobs_j <= found.pipelines_j * (1 + 1e-9)
        return found if is_written else None

    found = cast(Row[Any], until(measured))
    with engine.begin() as connection:
        by_tenant = costs.costs(connection, num_days=1, by=["tenant"])
    engine.dispose()

    assert found.sources == "table"
    assert 0 < found.least_j <= found.jobs_j
    kwh = sum(each.kwh or 0.0 for each in by_tenant)
    assert kwh == pytest.approx(found.jobs_j / 3.6e6, rel=0.2), "the mean moves a little"


def test_flower_refuses_without_the_password(stack: Stack) -> None:
    flower = stack.look()["urls"]["flower"]
    assert httpx.get(f"{flower}/api/workers").status_code == 200
    bare = httpx.URL(flower).copy_with(userinfo=b"")
    assert httpx.get(bare.join("/api/workers")).status_code == 401
    assert httpx.get(bare.join("/")).status_code == 401


def test_a_second_stack_in_one_folder_is_refused(stack: Stack) -> None:
    second = stack.command("up")
    assert second.returncode == 1
    assert "already runs" in second.stdout
    assert stack.complete().status_code == 200


def test_a_stage_is_forked_also_after_a_kill_and_its_environment_shows(stack: Stack) -> None:
    before = stack.look()["processes"]["stage-1"]
    os.kill(before, signal.SIGKILL)
    until(lambda: stack.look()["processes"].get("stage-1", before) != before)
    stage = psutil.Process(stack.look()["processes"]["stage-1"])
    assert (
        stage.cmdline()[:3]
        == psutil.Process(stack.look()["processes"]["warm-parent"]).cmdline()[:3]
    )
    assert (stage.name(), stage.ppid()) == ("stage-1", stack.process.pid)
    assert os.getsid(stage.pid) == stage.pid
    assert stage.environ()["SHARDLINE_PLACE"] == "1"
    assert stage.environ()["SHARDLINE_HOME"] == str(stack.home.folder)
    assert "SHARDLINE_ROOM" not in stage.environ()
    until(lambda: is_ready(stack))


def test_stages_outlive_their_warm_parent_and_a_killed_one_starts_without_it(stack: Stack) -> None:
    before = stack.look()["processes"]
    os.kill(before["warm-parent"], signal.SIGKILL)
    os.kill(before["stage-1"], signal.SIGKILL)
    until(
        lambda: all(
            stack.look()["processes"].get(name) not in (None, before[name]) for name in RESTARTED
        )
    )
    until(lambda: is_ready(stack))
    after = stack.look()["processes"]
    assert {**after, **{name: before[name] for name in RESTARTED}} == before, (
        "another process died with it"
    )
    assert stack.complete().status_code == 200


@pytest.mark.parametrize("name", ["stage-1", "relay", "gateway", "flower", "warm-parent"])
def test_a_killed_service_is_restarted_recorded_and_works(stack: Stack, name: str) -> None:
    before = stack.look()["processes"][name]
    os.kill(before, signal.SIGKILL)
    until(lambda: stack.look()["processes"].get(name, before) != before)
    until(lambda: is_ready(stack))
    assert stack.complete().status_code == 200
    assert f"{name} ended (killed by SIGKILL)" in stack.output.read_text()


def test_the_status_of_a_stack_lists_every_process(stack: Stack) -> None:
    status = stack.command("status")
    assert status.returncode == 0
    assert all(name in status.stdout for name in NAMES)


def test_two_stacks_on_shared_cores_say_so_and_both_answer(stack: Stack, own_stack: Stack) -> None:
    assert "shares cpu:" in own_stack.output.read_text()
    assert stack.complete().status_code == own_stack.complete().status_code == 200
    assert own_stack.command("down").returncode == 0
    assert own_stack.process.wait(60) == 0
    assert own_stack.left() == []
    assert own_stack.home.published() is None
    assert stack.complete().status_code == 200


def test_down_after_a_killed_supervisor_leaves_nothing(own_stack: Stack) -> None:
    own_stack.process.kill()
    own_stack.process.wait()
    assert own_stack.command("down").returncode == 0
    assert own_stack.left() == []
    assert own_stack.home.published() is None


def test_a_model_without_a_tokenizer_answers_ids_until_ctrl_c_stops_it_in_order(
    tmp_path: Path,
) -> None:
    own_stack = ForkedStack(
        tmp_path, SHARDLINE_MODEL=str(save_model(tmp_path)), SHARDLINE_STAGES="1"
    )
    own_stack.start()
    urls = own_stack.look()["urls"]
    with Client(database_url=urls["database"], redis_url=urls["redis"]) as client:
        job = client.wait(
            client.submit("llama", [5, 6, 7], max_tokens=4, ignore_eos=True), timeout_s=60
        )
    assert job.result is not None
    assert (job.result.text, len(job.result.token_ids)) == ("", 4)

    own_stack.process.send_signal(signal.SIGINT)
    assert own_stack.process.wait(120) == 0
    assert own_stack.left() == []
    assert own_stack.output.read_text().rstrip().endswith("stopped")


def test_a_taken_port_is_refused_and_names_the_setting(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = Stack(tmp_path, SHARDLINE_HTTP_PORT=str(port)).command("up")
    assert refused.returncode == 1
    assert f"SHARDLINE_HTTP_PORT: port {port} is taken" in refused.stdout


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("SHARDLINE_STAGES", "0"),
        ("SHARDLINE_STAGES", "9"),
        ("SHARDLINE_DTYPE", "int3"),
        ("SHARDLINE_SPLIT", "0-5"),
        ("SHARDLINE_MODEL", "/no/such/model"),
    ],
)
def test_an_impossible_setting_is_named_in_one_line(
    tmp_path: Path, setting: str, value: str
) -> None:
    refused = Stack(tmp_path, **{setting: value}).command("up")
    assert refused.returncode == 1
    assert setting in refused.stdout
    assert "Traceback" not in refused.stdout + refused.stderr


def test_down_succeeds_where_nothing_runs(tmp_path: Path) -> None:
    assert Stack(tmp_path / "nowhere").command("down").returncode == 0


def is_ready(stack: Stack) -> bool:
    """Whether a completion can pass through every stage now."""
    try:
        return httpx.get(f"{stack.look()['urls']['gateway']}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
