"""services/stage/README.md is a map: it names every module of the stage and no other, its layers and its threads."""

from __future__ import annotations

import ast
import re
import tomllib

from tests.repository import REPOSITORY

STAGE = REPOSITORY / "services/stage"
MAP = (STAGE / "README.md").read_text(encoding="utf-8")
ROWS = [line.split("|")[1] for line in MAP.splitlines() if line.startswith("| `")]
SOURCES = {path: path.read_text(encoding="utf-8") for path in STAGE.rglob("*.py")}
FILE = re.compile(r"`((?:\w+/)?\w+\.(?:py|cpp|h))`")


def modules() -> set[str]:
    """Files of the stage, without packages that hold a docstring only."""
    packages = {path for path, source in SOURCES.items() if path.name == "__init__.py" and source.count("\n") == 1}
    sources = [*SOURCES, *STAGE.rglob("*.cpp"), *STAGE.rglob("*.h")]
    return {str(path.relative_to(STAGE)) for path in sources if path not in packages}


def test_each_module_has_one_row_of_the_map_and_each_row_a_module() -> None:
    rows = [name for row in ROWS for name in FILE.findall(row)]
    assert sorted(rows) == sorted(modules())


def test_every_module_in_the_text_of_the_map_exists() -> None:
    named = {name for name in FILE.findall(MAP) if "/" in name}
    assert named - modules() == set()


def test_every_folder_has_a_section_of_the_map() -> None:
    folders = {path.parent.name for path in STAGE.glob("*/__init__.py")}
    assert set(re.findall(r"^### `(\w+)/`:", MAP, re.MULTILINE)) == folders


def test_the_layers_of_the_map_are_those_of_the_import_contract() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each.get("containers") == ["services.stage"])
    assert "```\n" + "\n".join(layers) + "\n```" in MAP


def test_every_class_in_the_map_exists() -> None:
    nodes = [node for source in SOURCES.values() for node in ast.walk(ast.parse(source))]
    classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    named = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)*)(?:\.\w+)?`", MAP)) - {"MainThread"}
    assert named - classes == set()


def test_every_thread_in_the_map_exists() -> None:
    threads = {row.strip(" `") for row in ROWS} - set(FILE.findall("".join(ROWS))) - {"MainThread"}
    given = {name for source in SOURCES.values() for name in re.findall(r'name(?:: str ?)?=\s?"([\w-]+)"', source)}
    assert threads
    assert threads - given == set()
