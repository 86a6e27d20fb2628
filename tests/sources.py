"""Our own source files as the tidy tests read them. Knows no rule."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.repository import REPOSITORY as ROOT

Function = ast.FunctionDef | ast.AsyncFunctionDef


def own_packages() -> set[str]:
    """Of the product, by name."""
    return {"services"} | {path.parent.name for path in (ROOT / "shared").glob("*/__init__.py")}


def python_files(*folders: str) -> list[Path]:
    """Of these folders, sorted."""
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert files, f"no Python files under {folders}"
    return sorted(
        path for path in files if not {"build", "__pycache__"} & set(path.relative_to(ROOT).parts)
    )


def product_files() -> list[Path]:
    """Of the product."""
    return python_files("services", "shared")


def all_files() -> list[Path]:
    """Of product, migrations, tests and what makes manifests."""
    return python_files("services", "shared", "migrations", "tests", "docker")


@cache
def tree(path: Path) -> ast.Module:
    """The parsed module."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def forget_trees() -> None:
    """Two million objects, which every later collection of garbage would look through."""
    tree.cache_clear()


@cache
def num_lines(path: Path) -> int:
    """Lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def functions(path: Path) -> Iterator[Function]:
    """Every function, also those inside functions."""
    return (node for node in ast.walk(tree(path)) if isinstance(node, Function))


def length(function: Function) -> int:
    """Lines of a function."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def calls(path: Path) -> Iterator[ast.Call]:
    """Every call."""
    return (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call))


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and module of each import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or "services"


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each string."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def at(path: Path, line: int, what: object) -> str:
    """Where something was found, for people."""
    return f"{path.relative_to(ROOT)}:{line}: {what}"


def members(scope: ast.Module | ast.ClassDef) -> Iterator[Function]:
    """Functions of a module and methods of its classes, but no function inside a function."""
    for node in scope.body:
        if isinstance(node, Function):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from members(node)


def parameters(function: Function) -> list[str]:
    """Without self and cls, and without the options of a command: typer's, or of a type with such a
    name."""
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    texts = {one.arg: ast.unparse(one.annotation) if one.annotation else "" for one in given}
    return [
        name
        for name, text in texts.items()
        if name not in {"self", "cls"} and "typer." not in text and not text.endswith("Option")
    ]


def signature(function: Function) -> str:
    """Annotated parameters and what is returned."""
    returns = "" if function.returns is None else f" -> {ast.unparse(function.returns)}"
    return ast.unparse(function.args) + returns
