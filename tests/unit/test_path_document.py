"""services/README.md names functions; each must exist where it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "services/README.md").read_text(encoding="utf-8")
REFERENCES = sorted(set(re.findall(r"`([\w/]+\.py)(?::([\w.]+))?`", DOCUMENT)))
STEPS = re.findall(r"^## (\d)\. .+?(?=^## )", DOCUMENT, re.MULTILINE | re.DOTALL)
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def names(node: ast.AST, prefix: str = "") -> set[str]:
    """Dotted names of the classes and functions defined directly in a module or class, and in those classes."""
    found = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            found.add(prefix + child.name)
            if isinstance(child, ast.ClassDef):
                found |= names(child, f"{prefix}{child.name}.")
    return found


@pytest.mark.parametrize(("file", "name"), REFERENCES)
def test_every_function_in_the_path_exists(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert not name or name in names(tree)


def test_the_path_has_eight_steps_and_crosses_every_service() -> None:
    assert "".join(STEPS) == "12345678"
    folders = {file.split("/")[1] for file, _ in REFERENCES if file.startswith("services/")}
    assert {"gateway", "relay", "stage", "standalone"} <= folders
