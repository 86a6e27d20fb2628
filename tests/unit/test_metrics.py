"""Metrics: names are unique across services and follow Prometheus's conventions."""

from __future__ import annotations

import math
import re
import urllib.request
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from services.stage.device.power import NominalPower, Power
from services.stage.device.watts import Watts
from services.stage.jobs.latency import Latency
from services.stage.metrics import MAX_TENANTS, StageMeter
from services.standalone.ports import free_port
from shardline.contract.job import JobState, SamplingParams
from shardline_costs import Link
from shardline_costs.drift import Drift
from shardline_scheduler.events import NewTokens
from shardline_scheduler.step_plan import Move, Open, Row, StepPlan
from shardline_scheduler.step_times import EngineProgress
from shardline_server import metrics
from tests.repository import REPOSITORY
from tests.unit.fleet.planner.fleets import device, model


def test_every_metrics_name_is_unique_and_ours() -> None:
    registry = CollectorRegistry()
    for kind in (
        metrics.GatewayMetrics,
        metrics.RelayMetrics,
        metrics.StageMetrics,
        metrics.HeadMetrics,
    ):
        kind(registry)
    names = [metric.name for metric in registry.collect()]
    assert len(names) == len(set(names))
    assert all(name.startswith("shardline_") for name in names)
    assert all(metric.documentation for metric in registry.collect())


def test_scrapers_read_the_served_port() -> None:
    registry = CollectorRegistry()
    metrics.RelayMetrics(registry).sent.labels("clerk").inc(3)
    port = free_port()
    metrics.serve(port, registry, host="127.0.0.1")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    assert 'shardline_relay_sent_total{model="clerk"} 3.0' in text
    assert text.splitlines()[0] == generate_latest(registry).decode().splitlines()[0]


def meter_of_stage(
    *, is_head: bool, drift: Drift | None = None, power: Power | None = None
) -> StageMeter:
    """Of one that has just started."""
    executor = SimpleNamespace(exact=True, blocks_used=3, num_blocks=8, states_used=0, num_states=0)
    loaded = SimpleNamespace(
        executor=executor,
        settings=SimpleNamespace(name="clerk", times=SimpleNamespace(stall_s=30.0)),
        is_head=is_head,
        drift=drift,
        power=power,
        layers=range(4),
        worker="w@h",
        device=SimpleNamespace(name="cpu:0"),
    )
    return StageMeter(cast(Any, loaded))


def scrape_of_stage(*, is_head: bool) -> str:
    """What it shows after a step."""
    meter = meter_of_stage(is_head=is_head)
    prompt = Open(
        seq=0,
        ids=(5,) * 71,
        num_prompt=71,
        params=SamplingParams(),
        seed=1,
        num_blocks=2,
        num_cached=64,
    )
    rows = (
        Row(0, 64, 7, (), (0, 1), wants=True),
        Row(1, 9, 4, (5,), (), wants=True, drafts=(6, 7, 8)),
    )
    moves = (Move(0, 0, is_out=True), Move(1, 1, is_out=True), Move(2, 0, is_out=False))
    plan = StepPlan(0, (prompt,), rows, (), moves=moves)
    meter.step(
        plan,
        EngineProgress(epoch=1).finish(
            plan, began_s=2.0, compute_began_s=2.5, computed_s=6.5, ended_s=7.0
        ),
    )
    meter.report(
        [
            NewTokens(key=(job, 1), start=0, ids=ids, text="")
            for job, ids in (("a", (4,)), ("b", (6, 7, 9)))
        ]
    )
    return generate_latest(meter.registry).decode()


def test_stages_of_a_pipeline_count_each_token_once() -> None:
    head = scrape_of_stage(is_head=True)
    later = scrape_of_stage(is_head=False)
    assert "shardline_output_tokens_total 4.0" in head
    assert "shardline_draft_tokens_total 3.0" in head
    assert "shardline_accepted_tokens_total 2.0" in head
    assert "shardline_prompt_tokens_total 7.0" in head
    assert "shardline_cached_tokens_total 64.0" in head
    assert "tokens_total" not in later
    assert "shardline_steps_total 1.0" in head
    assert "shardline_steps_total 1.0" in later
    assert 'shardline_stage_seconds_total{doing="compute"} 4.0' in later
    assert 'shardline_stage_seconds_total{doing="hop"} 1.0' in later
    assert 'shardline_kv_moves_total{direction="out"} 2.0' in later
    assert 'shardline_kv_moves_total{direction="back"} 1.0' in later


def test_a_later_stage_does_not_report_its_pipeline_down() -> None:
    assert "shardline_pipeline_ready 0.0" in scrape_of_stage(is_head=True)
    assert "shardline_pipeline_ready" not in scrape_of_stage(is_head=False)


ALERTS = (REPOSITORY / "docker/monitoring/prometheus/alerts.yaml").read_text(encoding="utf-8")
LATER = {"shardline_oldest_queued_seconds", "shardline_http_requests_total"}
"""Once there is a model, and a request: nobody waits before."""


@pytest.mark.parametrize("name", sorted(set(re.findall(r"shardline_\w+", ALERTS)) - LATER))
def test_services_that_have_just_started_export_what_each_alarm_reads(name: str) -> None:
    relay = CollectorRegistry()
    metrics.RelayMetrics(relay)
    shown = scrape_of_stage(is_head=True) + generate_latest(relay).decode()
    assert re.search(rf"^{name}(_total)?(\{{.*\}})? ", shown, re.MULTILINE), name


def test_a_measured_device_shows_its_rates_and_links_which_follow_its_drift() -> None:
    links = {"two": Link(latency_s=0.02, bytes_per_s=5e8)}
    drift = Drift(device("a:0", links=links), model(), range(12))
    registry = meter_of_stage(is_head=False, drift=drift).registry

    def rate(name: str, **labels: str) -> float:
        value = registry.get_sample_value(f"shardline_{name}", labels)
        assert value is not None
        return value

    before = (
        rate("device_bytes_per_second", what="weights"),
        rate("device_operations_per_second", rows="256"),
    )
    assert before[1] == pytest.approx(64 * before[0] / 2), (
        "four bytes and two operations for each weight"
    )
    assert math.isnan(rate("device_bytes_per_second", what="kv")), "its context costs nothing"
    assert rate("link_latency_seconds", machine="two") == 0.02
    assert rate("link_bytes_per_second", machine="two") == 5e8

    drift.profile = drift.profile.scaled(2.0)
    assert rate("device_bytes_per_second", what="weights") == pytest.approx(before[0] / 2)
    assert rate("device_operations_per_second", rows="256") == pytest.approx(before[1] / 2)


def test_a_stage_shows_what_steps_took_and_what_its_device_drew_besides() -> None:
    power = NominalPower("table", Watts(busy=50.0, idle=1e6))
    meter = meter_of_stage(is_head=False, power=power)
    plan = StepPlan(0, (), (), ())
    times = {"began_s": 1.0, "compute_began_s": 2.0, "computed_s": 5.0, "ended_s": 6.0}
    meter.step(plan, EngineProgress(epoch=1).finish(plan, **times))
    registry = meter.registry

    def shown(doing: str) -> float:
        value = registry.get_sample_value(
            "shardline_energy_joules", {"doing": doing, "source": "table"}
        )
        assert value is not None
        return value

    assert shown("compute") == 150.0
    assert shown("rest") == 0.0, "it has computed for longer than it has lived"


def test_a_device_of_unknown_power_shows_no_energy() -> None:
    assert "shardline_energy_joules{" not in scrape_of_stage(is_head=True)


def test_a_stage_says_who_it_is() -> None:
    labels = {"model": "clerk", "worker": "w@h", "device": "cpu:0", "layers": "0-3"}
    assert (
        meter_of_stage(is_head=False).registry.get_sample_value("shardline_stage_info", labels) == 1
    )


def test_ended_jobs_are_counted_by_outcome_and_only_what_they_have_is_timed() -> None:
    meter = meter_of_stage(is_head=True)
    meter.ended(JobState.SUCCEEDED, Latency(whole_s=3.0, first_token_s=2.0, token_s=0.5))
    meter.ended(JobState.CANCELLED, Latency(whole_s=4.0, first_token_s=None, token_s=None))

    def shown(name: str, **labels: str) -> float | None:
        return meter.registry.get_sample_value(
            f"shardline_job_{name}", {"model": "clerk", **labels}
        )

    assert shown("seconds_sum", outcome="succeeded") == 3.0
    assert shown("seconds_sum", outcome="cancelled") == 4.0
    assert shown("seconds_count", outcome="failed") == 0, "a rate sees the first one"
    assert (shown("first_token_seconds_count"), shown("first_token_seconds_sum")) == (1, 2.0)
    assert (shown("token_seconds_count"), shown("token_seconds_sum")) == (1, 0.5)


def test_energy_of_jobs_is_counted_by_tenant_up_to_a_number_of_tenants() -> None:
    meter = meter_of_stage(is_head=True)
    for number in range(MAX_TENANTS + 2):
        meter.charge(f"t{number}", 2.0)
        meter.charge("t0", 1.0)

    def counted(tenant: str) -> float | None:
        return meter.registry.get_sample_value(
            "shardline_job_energy_joules_total", {"tenant": tenant}
        )

    assert counted("t0") == 2.0 + MAX_TENANTS + 2
    assert counted(f"t{MAX_TENANTS - 1}") == 2.0
    assert counted(f"t{MAX_TENANTS}") is None
    assert counted("other") == 4.0
