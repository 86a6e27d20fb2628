"""Writes Grafana's dashboards."""

from __future__ import annotations

from pathlib import Path

from docker.monitoring.dashboards import DASHBOARDS
from docker.monitoring.panels import rendered

FOLDER = Path(__file__).parent / "grafana" / "dashboards"


def files() -> dict[Path, str]:
    """The text of each file."""
    return {FOLDER / f"{each.name}.json": rendered(each) for each in DASHBOARDS}


def write() -> None:
    """Replaces what differs."""
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
