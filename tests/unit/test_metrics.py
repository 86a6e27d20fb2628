"""Metrics: names are unique across services and follow Prometheus's conventions."""

from __future__ import annotations

import urllib.request

from prometheus_client import CollectorRegistry, generate_latest

from services.standalone.ports import free_port
from shardline import metrics


def test_given_all_sets_when_registered_together_then_every_name_is_unique_and_ours() -> None:
    registry = CollectorRegistry()
    for kind in (metrics.GatewayMetrics, metrics.RelayMetrics, metrics.StageMetrics):
        kind(registry)
    names = [metric.name for metric in registry.collect()]
    assert len(names) == len(set(names))
    assert all(name.startswith("shardline_") for name in names)
    assert all(metric.documentation for metric in registry.collect())


def test_given_a_port_when_served_then_scrapers_read_it() -> None:
    registry = CollectorRegistry()
    metrics.RelayMetrics(registry).sent.labels("clerk").inc(3)
    port = free_port()
    metrics.serve(port, registry, host="127.0.0.1")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    assert 'shardline_relay_sent_total{model="clerk"} 3.0' in text
    assert text.splitlines()[0] == generate_latest(registry).decode().splitlines()[0]
