"""The house rules, checked. Each failure names the file, the line and the rule; nothing here knows what code does."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OPERATING = ROOT / "docs" / "operating.md"
STORE = Path("shared/shardline/store")
TABLES = ROOT / "shared/shardline/tables.py"

FILE_LINES_MAX = 400
FILE_LINES_MEDIAN = 120
FUNCTION_LINES_MAX = 60
FUNCTION_LINES_P90 = 30
FUNCTION_LINES_MEDIAN = 10
OWN_PACKAGES = {"shardline", "services", "tests", "migrations"}
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "os.system", "os.popen", "torch.load", "yaml.load"}
SQL_NAMES = {"text", "select", "insert", "update", "delete", "func"}
"""Of SQLAlchemy: who imports one writes a statement."""

UNSAFE_KEYWORDS = {"shell", "trust_remote_code", "weights_only"}
"""Allowed only with the safe value: shell=False, trust_remote_code=False, weights_only=True."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _python_files(*folders: str) -> list[Path]:
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert files, f"no Python files under {folders}"
    return sorted(path for path in files if not {"build", "__pycache__"} & set(path.relative_to(ROOT).parts))


def _product() -> list[Path]:
    return _python_files("services", "shared")


def _all() -> list[Path]:
    return _python_files("services", "shared", "migrations", "tests")


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def _num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(_tree(path)) if isinstance(node, Function))


def _length(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def _calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(_tree(path)) if isinstance(node, ast.Call))


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or "services"


def _strings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _at(path: Path, line: int, what: object) -> str:
    return f"{path.relative_to(ROOT)}:{line}: {what}"


def test_given_any_source_file_when_counted_then_it_has_at_most_400_lines() -> None:
    sources = [*_all(), *(ROOT / "services").rglob("*.cpp"), *(ROOT / "services").rglob("*.h")]
    assert [_at(path, _num_lines(path), "lines") for path in sources if _num_lines(path) > FILE_LINES_MAX] == []


def test_given_the_product_when_counted_then_the_median_file_is_short() -> None:
    lengths = [_num_lines(path) for path in _product() if _num_lines(path) > 1]
    assert statistics.median(lengths) <= FILE_LINES_MEDIAN


def test_given_any_function_when_counted_then_it_has_at_most_60_lines() -> None:
    long = [
        _at(path, function.lineno, f"{function.name} has {_length(function)} lines")
        for path in _all()
        for function in _functions(path)
        if _length(function) > FUNCTION_LINES_MAX
    ]
    assert long == []


def test_given_the_product_when_counted_then_functions_are_short() -> None:
    lengths = [_length(function) for path in _product() for function in _functions(path)]
    assert statistics.median(lengths) <= FUNCTION_LINES_MEDIAN
    assert statistics.quantiles(lengths, n=10)[-1] <= FUNCTION_LINES_P90


def test_given_any_module_when_opened_then_it_says_what_it_owns() -> None:
    assert [_at(path, 1, "no module docstring") for path in _all() if not ast.get_docstring(_tree(path))] == []


def test_given_any_function_when_read_then_it_imports_nothing_of_ours() -> None:
    hidden = [
        _at(path, line, f"import of {name} inside {function.name}")
        for path in _all()
        for function in _functions(path)
        for line, name in _imports(function)
        if name.split(".")[0] in OWN_PACKAGES
    ]
    assert hidden == []


def test_given_the_product_when_read_then_nothing_in_it_runs_foreign_bytes() -> None:
    unsafe = [
        _at(path, line, f"import of {name}")
        for path in _product()
        for line, name in _imports(_tree(path))
        if name.split(".")[0] in UNSAFE_MODULES
    ]
    for path in _product():
        for call in _calls(path):
            name = ast.unparse(call.func)
            if name in UNSAFE_CALLS:
                unsafe.append(_at(path, call.lineno, name))
            unsafe += [
                _at(path, call.lineno, f"{name}({ast.unparse(keyword)})")
                for keyword in call.keywords
                if keyword.arg in UNSAFE_KEYWORDS and ast.unparse(keyword.value) != str(keyword.arg == "weights_only")
            ]
    assert unsafe == []


def test_given_any_test_when_read_then_it_is_never_skipped_and_never_sleeps() -> None:
    forbidden = re.compile(r"^(pytest\.(mark\.)?(skip|skipif|xfail|importorskip)|unittest\.skip\w*|(\w+\.)?sleep)$")
    found = [
        _at(path, node.lineno, ast.unparse(node))
        for path in _python_files("tests")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Attribute | ast.Name) and forbidden.match(ast.unparse(node))
    ]
    assert found == []


def test_given_any_silenced_check_when_read_then_it_names_the_rule_and_the_reason() -> None:
    silenced = re.compile(r"#\s*(?:noqa|type:\s*ignore)(?P<rest>.*)")
    reasoned = re.compile(r"^(?::\s*[A-Z]+\d+(?:,\s*[A-Z]+\d+)*|\[[\w, -]+\])\s*.*\w{3}")
    bare = [
        _at(path, number, line.strip())
        for path in _all()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if path != Path(__file__)
        if (match := silenced.search(line)) and not reasoned.match(match["rest"])
    ]
    assert bare == []


def test_given_any_source_when_read_then_nothing_is_left_to_do() -> None:
    marker = re.compile(r"\b(" + "TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
    left = [
        _at(path, number, line.strip())
        for path in [*_all(), *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if marker.search(line)
    ]
    assert left == []


def test_given_the_product_when_read_then_redis_keys_are_spelled_in_keys_only() -> None:
    spelled = [
        _at(path, line, text)
        for path in _product()
        if path.name != "keys.py"
        for line, text in _strings(path)
        if text.startswith("shardline:")
    ]
    assert spelled == []


def test_given_any_statement_when_read_then_each_cte_has_a_line_above_it_that_says_what_it_selects() -> None:
    begins = re.compile(r"^(?:\s*\),?\s*)?(?:WITH (?:RECURSIVE )?)?\w+ AS (?:(?:NOT )?MATERIALIZED )?\($")
    bare, num_ctes = [], 0
    for path in _python_files(str(STORE)):
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, (above, line) in enumerate(pairwise(lines), start=2):
            if begins.match(line):
                num_ctes += 1
                bare += [] if above.startswith("-- ") else [_at(path, number, line)]
    assert bare == []
    assert num_ctes >= 30, "the pattern finds the statements' CTEs no more"


def test_given_a_module_that_locks_rows_when_opened_then_it_says_which_ones_and_in_which_order() -> None:
    locks = re.compile(r"FOR UPDATE|with_for_update|pg_try_advisory")
    silent = [
        _at(path, 1, "no line with its locks")
        for path in _python_files(str(STORE))
        if locks.search(path.read_text(encoding="utf-8"))
        if "\nLocks: " not in (ast.get_docstring(_tree(path)) or "")
    ]
    assert silent == []


def test_given_the_product_when_read_then_all_sql_is_in_the_store() -> None:
    statement = re.compile(r"\s*(?:-- |(?:SELECT|INSERT|UPDATE|DELETE|WITH|LISTEN|NOTIFY|CREATE|ALTER|DROP|LOCK)\s)")
    elsewhere = [path for path in _product() if ROOT / STORE not in path.parents]
    found = [_at(path, line, text) for path in elsewhere for line, text in _strings(path) if statement.match(text)]
    for path in elsewhere:
        if path != TABLES:
            imports = (node for node in ast.walk(_tree(path)) if isinstance(node, ast.ImportFrom))
            taken = [node for node in imports if (node.module or "").split(".")[0] == "sqlalchemy"]
            found += [_at(path, node.lineno, ast.unparse(node)) for node in taken if _names(node) & SQL_NAMES]
    assert found == []


def _names(node: ast.ImportFrom) -> set[str]:
    return {alias.name for alias in node.names}


def test_given_any_setting_when_looked_up_then_operating_md_has_it_in_its_table() -> None:
    table = set(re.findall(r"^\|\s*`(SHARDLINE_[A-Z0-9_]+)`", OPERATING.read_text(encoding="utf-8"), re.MULTILINE))
    assert sorted(_settings() - table) == [], "settings that docs/operating.md does not explain"
    assert sorted(table - _settings()) == [], "settings that docs/operating.md explains and nobody reads"


def _settings() -> set[str]:
    """Fields of every Settings class: each is read from SHARDLINE_<NAME>."""
    found = set()
    for path in _product():
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Settings") for base in node.bases):
                fields = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
                found |= {f"SHARDLINE_{ast.unparse(field).upper()}" for field in fields}
    return found


def test_given_any_document_when_a_relative_link_is_followed_then_something_is_there() -> None:
    link = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:|#)([^)#\s]+)(?:#[^)]*)?\)")
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "services").rglob("*.md")]
    dead = [
        _at(document, number, target)
        for document in documents
        for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), start=1)
        for target in link.findall(line)
        if not (document.parent / target).exists()
    ]
    assert dead == []


def test_given_the_readme_when_read_then_it_names_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make demo" in readme
    assert "make up" in readme
