"""The house rules, checked. Each failure names the file, the line and the rule; nothing here knows
what code does."""

from __future__ import annotations

import ast
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.repository import REPOSITORY as ROOT
from tests.sources import (
    Function,
    all_files,
    at,
    calls,
    forget_trees,
    functions,
    imports,
    length,
    members,
    num_lines,
    own_packages,
    parameters,
    product_files,
    python_files,
    signature,
    strings,
    tree,
)

STORES = (Path("shared/shardline/store"), Path("shared/shardline_server/store"))
TABLES = [
    ROOT / f"shared/shardline/contract/{name}.py"
    for name in (
        "tables",
        "table_parts",
        "fleet/fleet_tables",
        "parents/parent_table",
        "tenants/tenant_tables",
        "schedules/schedule_tables",
        "webhooks/webhook_tables",
    )
]

FILE_LINES_MAX = 400
FILE_LINES_MEDIAN = 120
FUNCTION_LINES_MAX = 60
FUNCTION_LINES_P90 = 30
FUNCTION_LINES_MEDIAN = 10
TEST_NAME_LENGTH_MAX = 80
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "os.system", "os.popen", "torch.load", "yaml.load"}
SQL_NAMES = {"text", "select", "insert", "update", "delete", "func"}
"""Of SQLAlchemy: who imports one writes a statement."""

UNSAFE_KEYWORDS = {"shell", "trust_remote_code", "weights_only"}
"""Allowed only with the safe value: shell=False, trust_remote_code=False, weights_only=True."""

CHAOS_ROOMS = (
    "mutants",
    "driver",
    "faults",
    "judge",
    "stack",
    "load",
    "network",
    "shims",
    "report",
)
"""Of tests/chaos: each imports only those that come after it."""

MAX_PARAMETERS = 7
"""Of a function, without self and cls. The options of a command are for its user and not
counted."""

GPU_KERNELS = "triton_kernels.py"
"""Functions in files of this name are programs of a GPU: all of a launch's arguments, and no cheap
call from one to another."""

SHAPE = re.compile(r"\[[^\[\]]+\]")
"""A tensor's shape in a docstring: [T, H], [..., K], [0], or [...] for any."""
DTYPE = re.compile(r"dtype|float|int(?:8|16|32|64)|bool")


@pytest.fixture(autouse=True, scope="module")
def _no_trees_afterwards() -> Iterator[None]:
    yield
    forget_trees()


def test_files_have_at_most_400_lines() -> None:
    sources = [*all_files(), *(ROOT / "services").rglob("*.cpp"), *(ROOT / "services").rglob("*.h")]
    assert [
        at(path, num_lines(path), "lines") for path in sources if num_lines(path) > FILE_LINES_MAX
    ] == []


def test_the_median_file_of_the_product_is_short() -> None:
    lengths = [num_lines(path) for path in product_files() if num_lines(path) > 1]
    assert statistics.median(lengths) <= FILE_LINES_MEDIAN


def test_functions_have_at_most_60_lines() -> None:
    long = [
        at(path, function.lineno, f"{function.name} has {length(function)} lines")
        for path in all_files()
        for function in functions(path)
        if length(function) > FUNCTION_LINES_MAX and path.name != GPU_KERNELS
    ]
    assert long == []


def test_functions_of_the_product_are_short() -> None:
    lengths = [length(function) for path in product_files() for function in functions(path)]
    assert statistics.median(lengths) <= FUNCTION_LINES_MEDIAN
    assert statistics.quantiles(lengths, n=10)[-1] <= FUNCTION_LINES_P90


def test_every_module_says_what_it_owns() -> None:
    assert [
        at(path, 1, "no module docstring")
        for path in all_files()
        if not ast.get_docstring(tree(path))
    ] == []


def test_public_functions_of_tensors_give_shape_and_dtype() -> None:
    tensor = re.compile(r"\bTensor\b")
    functions = [
        (path, function)
        for path in python_files("services/stage")
        for function in members(tree(path))
        if function.name == "__call__" or not function.name.startswith("_")
        if tensor.search(signature(function))
    ]
    assert functions, "no function of services/stage takes or returns a Tensor"
    bare = [
        at(path, function.lineno, f"{function.name} gives no shape, or no dtype, of its tensors")
        for path, function in functions
        if not (
            SHAPE.search(ast.get_docstring(function) or "")
            and DTYPE.search(ast.get_docstring(function) or "")
        )
    ]
    assert bare == []


def test_functions_import_nothing_of_ours() -> None:
    ours = own_packages() | {"tests", "migrations"}
    hidden = [
        at(path, line, f"import of {name} inside {function.name}")
        for path in all_files()
        for function in functions(path)
        for line, name in imports(function)
        if name.split(".")[0] in ours
    ]
    assert hidden == []


def test_folders_of_the_chaos_tool_import_one_way() -> None:
    chaos = ROOT / "tests" / "chaos"
    assert {
        path.name for path in chaos.iterdir() if path.is_dir() and path.name != "__pycache__"
    } == set(CHAOS_ROOMS)
    backwards = [
        at(path, line, f"import of {name}")
        for place, room in enumerate(CHAOS_ROOMS)
        for path in sorted((chaos / room).rglob("*.py"))
        for line, name in imports(tree(path))
        if name.startswith("tests.chaos.") and name.split(".")[2] not in CHAOS_ROOMS[place:]
    ]
    assert backwards == []


def test_folders_of_the_stages_tests_are_folders_of_the_stage() -> None:
    rooms = {path.name for path in (ROOT / "services" / "stage").iterdir() if path.is_dir()}
    tested = [
        path
        for suite in ("unit", "integration")
        for path in (ROOT / "tests" / suite / "stage").iterdir()
    ]
    assert tested
    assert [
        str(path.relative_to(ROOT)) for path in tested if path.is_dir() and path.name not in rooms
    ] == []


def test_nothing_in_the_product_runs_foreign_bytes() -> None:
    unsafe = [
        at(path, line, f"import of {name}")
        for path in product_files()
        for line, name in imports(tree(path))
        if name.split(".")[0] in UNSAFE_MODULES
    ]
    for path in product_files():
        for call in calls(path):
            name = ast.unparse(call.func)
            if name in UNSAFE_CALLS:
                unsafe.append(at(path, call.lineno, name))
            unsafe += [
                at(path, call.lineno, f"{name}({ast.unparse(keyword)})")
                for keyword in call.keywords
                if keyword.arg in UNSAFE_KEYWORDS
                and ast.unparse(keyword.value) != str(keyword.arg == "weights_only")
            ]
    assert unsafe == []


def test_no_test_is_skipped_or_sleeps() -> None:
    forbidden = re.compile(
        r"^(pytest\.(mark\.)?(skip|skipif|xfail|importorskip)|unittest\.skip\w*|(\w+\.)?sleep)$"
    )
    found = [
        at(path, node.lineno, ast.unparse(node))
        for path in python_files("tests")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute | ast.Name) and forbidden.match(ast.unparse(node))
    ]
    assert found == []


def test_names_of_tests_have_at_most_80_characters() -> None:
    names = [(path, function) for path in python_files("tests") for function in functions(path)]
    tests = [(path, function) for path, function in names if function.name.startswith("test_")]
    assert tests
    assert [
        at(path, function.lineno, f"{function.name} has {len(function.name)} characters")
        for path, function in tests
        if len(function.name) > TEST_NAME_LENGTH_MAX
    ] == []


def test_silenced_checks_name_the_rule_and_the_reason() -> None:
    silenced = re.compile(r"#\s*(?:noqa|type:\s*ignore)(?P<rest>.*)")
    reasoned = re.compile(r"^(?::\s*[A-Z]+\d+(?:,\s*[A-Z]+\d+)*|\[[\w, -]+\])\s*.*\w{3}")
    bare = [
        at(path, number, line.strip())
        for path in all_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if path != Path(__file__)
        if (match := silenced.search(line)) and not reasoned.match(match["rest"])
    ]
    assert bare == []


def test_each_class_name_has_one_meaning_in_its_package_folder() -> None:
    names = Counter(
        (path.parent, node.name)
        for path in product_files()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, number in names.items() if number > 1} == set()


def test_functions_take_seven_parameters_at_most() -> None:
    many = [
        at(path, node.lineno, node.name)
        for path in all_files()
        for node in ast.walk(tree(path))
        if isinstance(node, Function)
        and len(parameters(node)) > MAX_PARAMETERS
        and path.name != GPU_KERNELS
    ]
    assert many == []


def test_nothing_is_left_to_do() -> None:
    marker = re.compile(r"\b(" + "TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
    left = [
        at(path, number, line.strip())
        for path in [*all_files(), *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if marker.search(line)
    ]
    assert left == []


def test_redis_keys_are_spelled_in_keys_only() -> None:
    spelled = [
        at(path, line, text)
        for path in product_files()
        if path.name != "keys.py"
        for line, text in strings(path)
        if text.startswith("shardline:")
    ]
    assert spelled == []


def test_each_cte_has_a_line_above_it() -> None:
    begins = re.compile(
        r"^(?:\s*\),?\s*)?(?:WITH (?:RECURSIVE )?)?\w+ AS (?:(?:NOT )?MATERIALIZED )?\($"
    )
    bare = []
    num_ctes = 0
    for path in python_files(*map(str, STORES)):
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, (above, line) in enumerate(pairwise(lines), start=2):
            if begins.match(line):
                num_ctes += 1
                bare += [] if above.startswith("-- ") else [at(path, number, line)]
    assert bare == []
    assert num_ctes >= 30, "the pattern finds the statements' CTEs no more"


def test_modules_that_lock_rows_say_which_ones_in_which_order() -> None:
    locks = re.compile(r"FOR (?:NO KEY )?UPDATE|with_for_update|pg_try_advisory")
    silent = [
        at(path, 1, "no line with its locks")
        for path in python_files(*map(str, STORES))
        if locks.search(path.read_text(encoding="utf-8"))
        if "\nLocks: " not in (ast.get_docstring(tree(path)) or "")
    ]
    assert silent == []


def test_all_sql_is_in_the_store() -> None:
    statement = re.compile(
        r"\s*(?:-- |(?:SELECT|INSERT|UPDATE|DELETE|WITH|LISTEN|NOTIFY|CREATE|ALTER|DROP|LOCK)\s)"
    )
    stores = {ROOT / store for store in STORES}
    elsewhere = [path for path in product_files() if not stores & set(path.parents)]
    found = [
        at(path, line, text)
        for path in elsewhere
        for line, text in strings(path)
        if statement.match(text)
    ]
    for path in elsewhere:
        if path not in TABLES:
            imports = (node for node in ast.walk(tree(path)) if isinstance(node, ast.ImportFrom))
            taken = [node for node in imports if (node.module or "").split(".")[0] == "sqlalchemy"]
            found += [
                at(path, node.lineno, ast.unparse(node))
                for node in taken
                if _names(node) & SQL_NAMES
            ]
    assert found == []


def _names(node: ast.ImportFrom) -> set[str]:
    return {alias.name for alias in node.names}
