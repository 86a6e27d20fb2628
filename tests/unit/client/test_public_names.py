"""The public library: `from shardline import …` gives all that a producer needs, and loads only
what that takes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib

import pytest

import shardline
from tests.repository import REPOSITORY

DOORS = (REPOSITORY / "docs/doors.md").read_text(encoding="utf-8")
PYTHON_DOOR = DOORS.split("## Python")[1].split("\n## ")[0]
EXAMPLES = sorted((REPOSITORY / "docs/examples").glob("*.py"))
DRIVERS = {"sqlalchemy", "psycopg", "redis", "pydantic"}


def loaded_by(statement: str) -> set[str]:
    """The drivers, and the modules of ours, that a fresh interpreter has loaded after it."""
    program = f"import sys; {statement}; print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    names = set(ran.stdout.split())
    return {name for name in names if name in DRIVERS or name.split(".")[0] == "shardline"}


def imported_names(program: str) -> set[str]:
    """What a program imports from the library, as `module.name`."""
    froms = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.ImportFrom)]
    return {
        f"{node.module}.{alias.name}"
        for node in froms
        for alias in node.names
        if "shardline" in str(node.module)
    }


@pytest.mark.parametrize("name", shardline.__all__)
def test_every_public_name_resolves(name: str) -> None:
    value = getattr(shardline, name)
    assert not isinstance(value, type) or value.__name__ == name


def test_dir_shows_the_public_names_and_nothing_else() -> None:
    assert dir(shardline) == sorted(set(shardline.__all__))


def test_an_unknown_name_is_refused() -> None:
    unknown = "Clinet"
    with pytest.raises(AttributeError, match="module 'shardline' has no attribute 'Clinet'"):
        getattr(shardline, unknown)


def test_an_import_of_the_package_alone_loads_nothing_else() -> None:
    assert loaded_by("import shardline") == {"shardline"}


def test_an_error_and_a_record_load_no_driver() -> None:
    loaded = loaded_by("from shardline import Delta, Invalid, Job, JobRequest")
    records = {
        "base",
        "base.errors",
        "base.trace_context",
        "contract",
        "contract.chat",
        "contract.decision",
        "contract.job",
        "contract.parents",
        "contract.parents.parent_job",
        "contract.retry_policy",
        "contract.structured_output",
        "contract.tool_choice",
        "contract.wire",
    }
    assert loaded == {"shardline", *(f"shardline.{name}" for name in records)}


def test_a_client_loads_its_drivers() -> None:
    # So the tests above can fail: the names of the drivers are right.
    assert loaded_by("from shardline import Client") > DRIVERS


def test_the_version_is_that_of_pyproject() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert shardline.__version__ == project["version"]


def test_documents_and_examples_import_public_names_only() -> None:
    documents = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    blocks = [
        block
        for path in documents
        for block in re.findall(
            r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
    ]
    names = set[str]().union(
        *map(imported_names, [*blocks, *(path.read_text(encoding="utf-8") for path in EXAMPLES)])
    )
    assert "shardline.Client" in names
    assert names <= {f"shardline.{name}" for name in shardline.__all__}


def test_every_class_that_the_python_door_names_is_public() -> None:
    named = set(re.findall(r"`([A-Z]\w+)`", PYTHON_DOOR)) - {"TimeoutError"}
    assert {"AsyncClient", "Busy", "Diverged", "JobFailed"} <= named
    assert named <= set(shardline.__all__)
