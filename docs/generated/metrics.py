"""docs/reference/metrics.md: every metric, from the sets that services register."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry

from docs.generated.tables import sentence, table
from shardline_server.metrics import GatewayMetrics, HeadMetrics, RelayMetrics, StageMetrics

MetricSet = GatewayMetrics | RelayMetrics | StageMetrics | HeadMetrics

SECTIONS: dict[str, type[MetricSet]] = {
    "Gateway": GatewayMetrics,
    "Relay": RelayMetrics,
    "Stage": StageMetrics,
    "Head: a stage at place 0": HeadMetrics,
}

INTRODUCTION = """# Metrics

`make documents` writes this page from `shared/shardline_server/metrics.py`. Each process has one
Prometheus endpoint.
What to look at, and what the values mean: [watch](../operating/watch.md).
"""


def page() -> str:
    """Returns the page in Markdown."""
    return "\n".join([INTRODUCTION, *_sections()])


def _sections() -> Iterator[str]:
    for heading, kind in SECTIONS.items():
        yield from (f"## {heading}", "")
        yield from table("metric", "type", "labels", "meaning", rows=_rows(kind))


def _rows(
    kind: type[MetricSet],
) -> Iterator[tuple[str, str, str, str]]:
    for metric in vars(kind(CollectorRegistry())).values():
        labels = ", ".join(metric._labelnames)  # noqa: SLF001 (no other way without samples)
        for family in metric.describe():
            ending = "_total" if family.type == "counter" else ""
            yield f"`{family.name}{ending}`", family.type, labels, sentence(family.documentation)
