"""What documents and texts say of the repository: settings, links and spelling."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

from tests.repository import REPOSITORY as ROOT
from tests.sources import at, product_files, tree

SETTINGS = ROOT / "docs" / "reference" / "settings.md"
BRITISH = re.compile(
    r"(token|normal|optim|quant|summar|recogn|initial|organ|serial|synchron|priorit|util|author"
    r"|general|minim|maxim)is(e|ing|ation)"
    r"|(behavi|col|fav|flav|harb|hon|hum|lab|neighb|rum)our(?!ce)"
    r"|(catal|dial|anal)ogue|(cent|fib|lit)re\b|centred|(lic|def|off)ence"
    r"|judgement|grey|artefact|analyse|(mode|labe|signa|trave)ll(ed|ing)"
    r"|\b(maths|misspelt|learnt|spelt|whilst|amongst|fulfil|ageing)\b",
    re.IGNORECASE,
)
"""Spellings that no file has. `cancelled` is American too, and a job's state on every wire."""

NAMED_ELSEWHERE = re.compile(
    r"settings_customise_sources"  # pydantic-settings
    r"|prepared_means_tokenised"  # a constraint in databases that exist
)
SUFFIXES = (".md", ".py", ".toml", ".yaml", ".yml", ".sh", ".cpp", ".h", ".ini", ".txt", ".example")
SPELLED = (*SUFFIXES, "Makefile", "Dockerfile")


def test_the_page_of_settings_has_the_fields_of_every_settings_class() -> None:
    table = set(
        re.findall(
            r"^\|\s*`(SHARDLINE_[A-Z0-9_]+)`", SETTINGS.read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    assert sorted(_settings() - table) == [], (
        "settings of a class that docs/generated/settings.py does not name"
    )


def _settings() -> set[str]:
    """Fields of every Settings class: each is read from SHARDLINE_<NAME>."""
    found = set()
    for path in product_files():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef) and any(
                ast.unparse(base).endswith("Settings") for base in node.bases
            ):
                fields = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
                found |= {f"SHARDLINE_{ast.unparse(field).upper()}" for field in fields}
    return found


def test_relative_links_of_documents_lead_somewhere() -> None:
    link = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:|#)([^)#\s]+)(?:#[^)]*)?\)")
    documents = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "services").rglob("*.md"),
    ]
    dead = [
        at(document, number, target)
        for document in documents
        for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), start=1)
        for target in link.findall(line)
        if not (document.parent / target).exists()
    ]
    assert dead == []


def test_the_readme_names_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make demo" in readme
    assert "make up" in readme


def test_every_tracked_file_has_american_spelling() -> None:
    found = [
        f"{name}:{number}: {match[0]}"
        for name in _tracked()
        for number, line in enumerate([name, *_current_lines(ROOT / name)])
        for match in BRITISH.finditer(NAMED_ELSEWHERE.sub("", line))
    ]
    assert found == []


def _tracked() -> list[str]:
    """Text files of this repository but this one, which lists what others must not have."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [
        name
        for name in listed.split("\0")
        if name.endswith(SPELLED) and name != "tests/unit/test_texts.py"
    ]


def _current_lines(path: Path) -> list[str]:
    """All lines; of the changelog those that no release has yet."""
    text = path.read_text(encoding="utf-8")
    return "".join(
        re.split(r"^(?=## \[)", text, flags=re.MULTILINE)[:2]
        if path.name == "CHANGELOG.md"
        else text
    ).split("\n")
