"""Turns a dashboard of one line a panel into the JSON that Grafana reads. Knows no metric."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SOURCE = {"type": "prometheus", "uid": "prometheus"}
"""As provisioned next to the dashboards."""
COLUMNS = 3
WIDTH = 24 // COLUMNS
"""A dashboard is 24 wide."""
HEIGHT = 7
SCHEMA_VERSION = 39

Query = tuple[str, str]
"""A legend, such as `{{worker}}`, and an expression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One graph."""

    title: str
    unit: str
    """In Grafana's words: percentunit, s, reqps, short, watt, bytes."""
    queries: tuple[Query, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """Graphs on one page. `model` is a choice of its reader, in queries `$model`."""

    name: str
    title: str
    panels: Sequence[Panel]
    has_model: bool = False


def panel(title: str, unit: str, *queries: Query) -> Panel:
    """A graph in one line."""
    return Panel(title=title, unit=unit, queries=queries)


def rendered(dashboard: Dashboard) -> str:
    """The file's text."""
    document = {
        "uid": f"shardline-{dashboard.name}",
        "title": f"Shardline: {dashboard.title}",
        "tags": ["shardline"],
        "schemaVersion": SCHEMA_VERSION,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_model_variable()] if dashboard.has_model else []},
        "panels": [_panel(number, each) for number, each in enumerate(dashboard.panels)],
    }
    return json.dumps(document, indent=1) + "\n"


def _model_variable() -> dict[str, Any]:
    return {
        "name": "model",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": "label_values(shardline_stage_info, model)", "refId": "model"},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": query, "legendFormat": legend}
            for place, (legend, query) in enumerate(panel.queries)
        ],
    }
