"""What README and docs name exists, and what exists is named there: paths, settings, metrics,
words, missed targets."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from services.gateway.settings import GatewaySettings
from services.relay.settings import RelaySettings
from services.stage.settings import StageSettings
from services.standalone.settings import StandaloneSettings
from shardline.base.config import ENV_PREFIX, Settings
from shardline_server.metrics import GatewayMetrics, HeadMetrics, RelayMetrics, StageMetrics
from tests.benchmarks.report import LATEST, Figure

ROOT = Path(__file__).resolve().parents[2]
OPERATING = "\n".join(
    path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs/operating").glob("*.md"))
)
DOCUMENTS = [ROOT / "README.md", ROOT / ".env.example", *sorted((ROOT / "docs").rglob("*.md"))]
READERS = [
    ROOT / "compose.yaml",
    *sorted((ROOT / "docs/examples").glob("*.py")),
    *sorted(path for path in (ROOT / "docker").glob("*") if path.is_file()),
    *sorted((ROOT / "tests/compose").glob("*.py")),
    ROOT / "tests/conftest.py",
]
PAGES = [*DOCUMENTS, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "services").rglob("*.md"))]
PATH = re.compile(
    r"(?<![\w/.-])((?:services|shared|tests|migrations|docker|docs)/[\w/.-]*\w)(?![\w*<{…/])"
)
GLOSSARY = (
    (ROOT / "docs/architecture.md")
    .read_text(encoding="utf-8")
    .partition("## Words")[2]
    .partition("\n## ")[0]
)
SERVICES = (Settings, GatewaySettings, RelaySettings, StageSettings, StandaloneSettings)
VARIABLE = re.compile(rf"\b{ENV_PREFIX}[A-Z0-9_]*[A-Z0-9]\b")
EXAMPLE = {"SHARDLINE_X", "SHARDLINE_X_FILE"}
BESIDE_SETTINGS = {
    "SHARDLINE_FAILPOINTS",
    "SHARDLINE_KERNEL",
    "SHARDLINE_KERNEL_DIR",
}
"""Read where no settings are: before they exist, or in every process."""


def variables(files: Iterable[Path]) -> set[str]:
    """All that the files name; a value may also come from a file."""
    named = {name for file in files for name in VARIABLE.findall(file.read_text(encoding="utf-8"))}
    return {name.removesuffix("_FILE") for name in named - EXAMPLE}


SETTINGS = {
    f"{ENV_PREFIX}{field.upper()}" for service in SERVICES for field in service.model_fields
} | BESIDE_SETTINGS


def metrics() -> set[str]:
    """As Prometheus shows them, without the ending of counters."""
    registry = CollectorRegistry()
    for kind in (GatewayMetrics, RelayMetrics, StageMetrics, HeadMetrics):
        kind(registry)
    return {metric.name for metric in registry.collect()}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_something_reads_every_documented_variable(document: Path) -> None:
    assert variables([document]) - SETTINGS - variables(READERS) == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_path_in_a_document_exists(page: Path) -> None:
    assert {
        path
        for path in PATH.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / path).exists()
    } == set()


def test_every_class_in_the_glossary_exists() -> None:
    sources = [path for folder in ("services", "shared") for path in (ROOT / folder).rglob("*.py")]
    nodes = [
        node for path in sources for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ]
    classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    named = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)*)(?:\.\w+)?`", GLOSSARY))
    assert named
    assert named - classes == set()


VERSION_TABLE = "shardline_version"
"""Of migrations; no metric."""


@pytest.mark.parametrize("place", re.findall(r"`([\w/]+\.py:[\w.]+)`", OPERATING))
def test_bounds_in_operating_stand_where_it_says(place: str) -> None:
    file, _, name = place.partition(":")
    names = name.split(".")
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    for depth, part in enumerate(names, start=1):
        found = [node for node in body if part in _defines(node)]
        assert found, f"{file} has no {name}"
        body = found[0].body if isinstance(found[0], ast.ClassDef) and depth < len(names) else []


def _defines(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef):
        return [node.name]
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_every_metric_that_operating_names_exists() -> None:
    named = set(re.findall(r"\b(shardline_[a-z_]+)\b(?!/)", OPERATING)) - {VERSION_TABLE}
    assert named
    assert {name.removesuffix("_total") for name in named} - metrics() == set()


def test_the_readme_names_every_missed_target() -> None:
    figures = msgspec.json.decode(LATEST.read_bytes(), type=list[Figure])
    section = (
        (ROOT / "README.md")
        .read_text(encoding="utf-8")
        .partition("## How fast")[2]
        .partition("\n## ")[0]
    )
    missed = {figure.name for figure in figures if figure.is_met is False}
    assert set(re.findall(r"`([a-z]+-[a-z0-9-]+)`", section.partition("misses")[2])) == missed
    has_stages = any(figure.name.startswith("two-stages") for figure in figures)
    assert ("no row of two stages against one" in " ".join(section.split())) is not has_stages
