"""Asks a Prometheus what Grafana's panels ask: for the live test and for the picture in
docs/monitoring.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from docker.monitoring.panels import Dashboard

RANGE = "1m"
"""What Grafana's $__rate_interval would be: four scrapes and more."""


def expression(query: str) -> str:
    """A query with what Grafana fills in."""
    return query.replace("$__rate_interval", RANGE).replace("$model", ".*")


def instant(prometheus: str, query: str) -> Sequence[Mapping[str, Any]]:
    """The series that a query has now. Raises httpx.HTTPStatusError for one that Prometheus
    refuses."""
    return _asked(prometheus, "query", query=expression(query))


def over(
    prometheus: str, query: str, *, start_s: float, end_s: float, step_s: float
) -> Sequence[Mapping[str, Any]]:
    """The series of a query in an interval of Unix time."""
    times = {"start": start_s, "end": end_s, "step": step_s}
    return _asked(prometheus, "query_range", query=expression(query), **times)


def empty(prometheus: str, dashboard: Dashboard) -> list[str]:
    """Panels of which a query has no series."""
    return [
        f"{dashboard.name}: {panel.title}"
        for panel in dashboard.panels
        for _, query in panel.queries
        if not instant(prometheus, query)
    ]


def _asked(prometheus: str, how: str, **parameters: Any) -> Sequence[Mapping[str, Any]]:
    reply = httpx.get(f"{prometheus}/api/v1/{how}", params=parameters, timeout=30)
    reply.raise_for_status()
    found: Sequence[Mapping[str, Any]] = reply.json()["data"]["result"]
    return found
