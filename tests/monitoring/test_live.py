"""A real Prometheus scrapes a real stack under load, and no panel is empty. Needs Debian's
prometheus."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from docker.monitoring.dashboards import DASHBOARDS
from services.standalone.ports import free_port
from services.standalone.state_dir import TARGETS_FILE
from shardline.contract.api_key import bearer
from tests.faults.small_stack import DOORS, Producer
from tests.monitoring.queries import empty, instant
from tests.polling import until, within
from tests.repository import REPOSITORY
from tests.stack import Stack

PATIENCE_S = 240.0
OF_SEVERAL = ("fleet: Latency of links", "fleet: Bandwidth of links")
"""Measured when a worker joins and finds another one: of two that start together, perhaps by
none."""
CONFIG = REPOSITORY / "docker/monitoring/prometheus/local.yaml"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A fleet of two workers that shows its metrics and knows what a kWh costs."""
    settings = {
        "SHARDLINE_METRICS_PORT": str(free_port()),
        "SHARDLINE_WORKERS": "2",
        "SHARDLINE_ENERGY_PRICE": "0.3",
    }
    stack = Stack(tmp_path_factory.mktemp("stack"), **settings)
    del stack.settings["SHARDLINE_SPLIT"]
    stack.start()
    yield stack
    stack.end()


@contextmanager
def prometheus(stack: Stack, folder: Path) -> Iterator[str]:
    """The address of one that scrapes it each second, as docker/monitoring/prometheus/local.yaml
    says."""
    program = shutil.which("prometheus")
    assert program, "no prometheus on PATH: apt-get install prometheus"
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(CONFIG.parent / "alerts.yaml")]
    (scraped,) = config["scrape_configs"]
    scraped["file_sd_configs"] = [{"files": [str(stack.home.folder / TARGETS_FILE)]}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    options = {
        "config.file": folder / "prometheus.yaml",
        "web.listen-address": address,
        "storage.tsdb.path": folder,
    }
    argv = [program, *(f"--{name}={value}" for name, value in options.items())]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: _answers(f"http://{address}/-/ready"))
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


def test_every_panel_shows_data_of_a_stack_under_load(stack: Stack, tmp_path: Path) -> None:
    urls = stack.urls
    producer = Producer(urls, max_tokens=60)

    def no_panel_is_empty(address: str) -> bool:
        for _ in DOORS:
            producer.ask()
        complete(urls, stream=True)
        complete(urls, temperature=-1)
        return empty_panels(address) == []

    with prometheus(stack, tmp_path) as address:
        shows_all = within(PATIENCE_S, lambda: no_panel_is_empty(address), look_s=1.0)
        assert empty_panels(address) == []
        assert shows_all
        assert instant(address, 'ALERTS{alertstate="firing", severity="critical"}') == []
    producer.close()


def empty_panels(address: str) -> list[str]:
    """Of all dashboards."""
    panels = [panel for dashboard in DASHBOARDS for panel in empty(address, dashboard)]
    return [panel for panel in panels if panel not in OF_SEVERAL]


def complete(urls: Mapping[str, str], **fields: object) -> None:
    """Ask the gateway and read the whole answer, whatever it is."""
    body = {"model": "clerk", "prompt": "sort: 3, 1, 2 =", "max_tokens": 16, **fields}
    httpx.post(
        f"{urls['gateway']}/v1/completions", json=body, headers=bearer(urls["api_key"]), timeout=60
    )
