"""services/stage/README.md is a map: the modules, classes and threads that it names exist."""

from __future__ import annotations

import ast
import re

from tests.repository import REPOSITORY

STAGE = REPOSITORY / "services/stage"
SCHEDULER = REPOSITORY / "shared/shardline_scheduler"
MAP = (STAGE / "README.md").read_text(encoding="utf-8")
ROWS = [line.split("|")[1] for line in MAP.splitlines() if line.startswith("| `")]
SOURCES = {path: path.read_text(encoding="utf-8") for path in STAGE.rglob("*.py")}
FILE = re.compile(r"`((?:\w+/)?\w+\.(?:py|cpp|h))`")


def modules() -> set[str]:
    """Files of the stage, without packages that hold a docstring only."""
    packages = {
        path
        for path, source in SOURCES.items()
        if path.name == "__init__.py" and source.count("\n") == 1
    }
    sources = [*SOURCES, *STAGE.rglob("*.cpp"), *STAGE.rglob("*.h")]
    return {str(path.relative_to(STAGE)) for path in sources if path not in packages}


def test_every_module_in_the_text_of_the_map_exists() -> None:
    named = {name for name in FILE.findall(MAP) if "/" in name}
    assert named - modules() == set()


def test_every_class_in_the_map_exists() -> None:
    sources = [
        *SOURCES.values(),
        *(path.read_text(encoding="utf-8") for path in SCHEDULER.glob("*.py")),
    ]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    named = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)*)(?:\.\w+)?`", MAP)) - {"MainThread"}
    assert named - classes == set()


def test_every_thread_in_the_map_exists() -> None:
    threads = {row.strip(" `") for row in ROWS} - set(FILE.findall("".join(ROWS))) - {"MainThread"}
    given = {
        name
        for source in SOURCES.values()
        for name in re.findall(r'name(?:: str ?)?=\s?"([\w-]+)"', source)
    }
    assert threads
    assert threads - given == set()
