"""Dashboards and alert rules ask only for metrics that there are, by labels that they have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from docker.monitoring.__main__ import FOLDER, files
from shardline_server.metrics import GatewayMetrics, HeadMetrics, RelayMetrics, StageMetrics
from tests.repository import REPOSITORY

MONITORING = REPOSITORY / "docker" / "monitoring"
ALERTS = MONITORING / "prometheus" / "alerts.yaml"
PAGE = (REPOSITORY / "docs" / "monitoring.md").read_text(encoding="utf-8")
TRIED = (REPOSITORY / "tests" / "monitoring" / "alerts.yaml").read_text(encoding="utf-8")

OF_PROMETHEUS = {"up": frozenset({"service", "instance"})}
"""What Prometheus makes itself, and the label by which it tells services apart."""
OF_TARGETS = {"instance", "service", "le"}
"""Labels that every scraped series may have."""
KEYWORDS = {
    *("by", "without", "on", "ignoring", "group_left", "and", "or"),
    *("sum", "max", "count", "rate", "increase", "absent", "label_replace", "histogram_quantile"),
}
ENDINGS = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
LISTED = re.compile(r"\b(?:by|without|on|ignoring|group_left)\s*\(([^)]*)\)")
SELECTED = re.compile(r"(\w+)\{([^}]*)\}")


def series() -> dict[str, frozenset[str]]:
    """The labels of each series that a service shows, by its name as Prometheus knows it."""
    found: dict[str, frozenset[str]] = {}
    for kind in (GatewayMetrics, RelayMetrics, StageMetrics, HeadMetrics):
        registry = CollectorRegistry()
        labels = {
            metric._name: frozenset(metric._labelnames)  # prometheus-client has no other way to ask
            for metric in vars(kind(registry)).values()
        }
        for family in registry.collect():
            found |= {
                f"{family.name}{ending}": labels[family.name] for ending in ENDINGS[family.type]
            }
    return found


SERIES = series()


def expressions() -> Iterator[Any]:
    """Every query with the labels that its legend or its summary names."""
    for path in sorted(FOLDER.glob("*.json")):
        for shown in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in shown["targets"]:
                legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                yield pytest.param(
                    target["expr"], legend, id=f"{path.stem}: {shown['title']} {target['refId']}"
                )
    for rule in rules():
        legend = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        yield pytest.param(rule["expr"], legend, id=rule["alert"])


def rules() -> list[dict[str, Any]]:
    """The alerts."""
    (group,) = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return list(group["rules"])


def problems(expression: str, legend: set[str]) -> list[str]:
    """What an expression names that does not exist."""
    known = SERIES | OF_PROMETHEUS
    bare = re.sub(r'"[^"]*"', '""', expression.replace("$__rate_interval", "1m"))
    asked = (
        set(re.findall(r"\b[a-z_][a-z0-9_]*\b", SELECTED.sub(r"\1", LISTED.sub("", bare))))
        - KEYWORDS
    )
    unknown = sorted(asked - known.keys())
    has = OF_TARGETS.union(*(known[name] for name in asked & known.keys()))
    listed = {label.strip() for group in LISTED.findall(bare) for label in group.split(",")}
    wrong = [
        f"{name} has no label {label}"
        for name, label in _selected(bare)
        if label not in known.get(name, ()) and label not in OF_TARGETS
    ]
    return (
        unknown
        + wrong
        + sorted(f"no metric has the label {label}" for label in (listed | legend) - has)
    )


def _selected(bare: str) -> Iterator[tuple[str, str]]:
    for name, matchers in SELECTED.findall(bare):
        yield from ((name, label) for label in re.findall(r"(\w+)\s*[=!]", matchers))


@pytest.mark.parametrize(("expression", "legend"), list(expressions()))
def test_it_asks_for_metrics_and_labels_that_there_are(expression: str, legend: set[str]) -> None:
    assert problems(expression, legend) == []


@pytest.mark.parametrize(
    ("expression", "legend", "problem"),
    [
        ("rate(shardline_stepz_total[5m])", set(), "shardline_stepz_total"),
        ("shardline_steps", set(), "shardline_steps"),
        ('shardline_kv_blocks{stat="used"}', set(), "shardline_kv_blocks has no label stat"),
        ("sum by (tenant) (shardline_kv_blocks)", set(), "no metric has the label tenant"),
        ("shardline_kv_blocks", {"worker"}, "no metric has the label worker"),
        ("rate(shardline_job_seconds[5m])", set(), "shardline_job_seconds"),
    ],
)
def test_a_name_or_label_that_does_not_exist_is_noticed(
    expression: str, legend: set[str], problem: str
) -> None:
    assert problems(expression, legend) == [problem]


def test_the_committed_dashboards_are_those_that_their_source_makes() -> None:
    committed = {path: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    assert committed == files(), "run `make dashboards`"


@pytest.mark.parametrize("name", sorted(SERIES.keys() - {f"{each}_created" for each in SERIES}))
def test_a_dashboard_or_an_alert_shows_every_metric(name: str) -> None:
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    shown = " ".join(str(each.values[0]) for each in expressions())
    assert re.search(rf"\b{base}(_bucket|_sum|_count)?\b", shown), (
        "add it to docker/monitoring/dashboards.py"
    )


@pytest.mark.parametrize("alert", [rule["alert"] for rule in rules()])
def test_every_alert_is_tried_and_has_its_row_in_the_page(alert: str) -> None:
    assert TRIED.count(f"alertname: {alert}\n") + TRIED.count(f"alertname: {alert} ") == 2, (
        "once silent, once firing"
    )
    assert f"| {alert} |" in PAGE


def test_compose_mounts_what_the_provisioned_files_name() -> None:
    compose = yaml.safe_load((REPOSITORY / "compose.yaml").read_text(encoding="utf-8"))["services"]
    mounts = dict(
        each.split(":")[:2]
        for name in ("prometheus", "grafana")
        for each in compose[name]["volumes"]
    )
    provider = yaml.safe_load(
        (MONITORING / "grafana/provisioning/dashboards/shardline.yaml").read_text()
    )
    source = yaml.safe_load(
        (MONITORING / "grafana/provisioning/datasources/prometheus.yaml").read_text()
    )
    scraped = yaml.safe_load((MONITORING / "prometheus/compose.yaml").read_text())["scrape_configs"]
    assert (
        mounts["./docker/monitoring/grafana/dashboards"]
        == provider["providers"][0]["options"]["path"]
    )
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    names = set(scraped[0]["dns_sd_configs"][0]["names"])
    assert names == {
        name
        for name, each in compose.items()
        if "SHARDLINE_METRICS_PORT" in str(each.get("environment"))
    } - {"migrate"}
    for path in (Path(each) for each in mounts if each.startswith("./")):
        assert (REPOSITORY / path).is_dir()
    for name in ("prometheus", "grafana"):
        assert compose[name]["profiles"] == ["monitoring"]
        assert compose[name]["read_only"]
        assert all(port.startswith("127.0.0.1:") for port in compose[name]["ports"])
