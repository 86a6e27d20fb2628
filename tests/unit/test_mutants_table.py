"""The table of mutants keeps what earlier runs have seen, wherever they ran, and takes what this
run has seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.mutants.catalog import MUTANTS
from tests.chaos.mutants.mutant import Hurt, Mutant
from tests.chaos.mutants.noticing import Judged
from tests.chaos.mutants.table import BEGIN, END, SAME, Seen, update
from tests.repository import REPOSITORY

HURT = Hurt(faults="kill head", counts=("lost",))
FENCE, SWEEPER, NEW = (
    Mutant(name=name, patches=(), hurt=HURT) for name in ("no fence", "no sweeper", "new")
)
DOCUMENT = f"""Text before.

{BEGIN}

|mutant|caught|by|real stack|
|---|---|---|---|
|no fence|20/20|test one|`lost` 4 under kill head|
|″|20/20|test two||
|gone|20/20|test three|-|
|no sweeper|19/20|test four|`lost` 24 under kill head|
|″|20/20|simulation||

{END}

Text after.
"""
TESTS = Seen(caught={"tests/test_x.py::test_five": (3, 5)}, stack=None, ran_stack=False)
STACK = Seen(caught=None, stack=Judged(counts={"lost": 7}, others={}, finding=""), ran_stack=True)


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "guarantees.md"
    path.write_text(DOCUMENT, encoding="utf-8")
    return path


def rows(document: Path) -> list[str]:
    lines = document.read_text(encoding="utf-8").splitlines()
    return [line for line in lines[lines.index(BEGIN) : lines.index(END)] if line.startswith("|")][
        2:
    ]


def test_only_what_ran_is_replaced_and_text_around_the_table_stays(document: Path) -> None:
    update(document, (FENCE, SWEEPER), {SWEEPER.name: TESTS._replace(ran_stack=True)})

    assert rows(document) == [
        "|no fence|20/20|test one|`lost` 4 under kill head|",
        f"|{SAME}|20/20|test two||",
        "|no sweeper|3/5|test five|-|",
    ]
    text = document.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[0] == "Text before.\n\n"
    assert text.partition(END)[2] == "\n\nText after.\n"


def test_a_run_of_the_tests_keeps_what_the_real_stack_has_shown(document: Path) -> None:
    update(document, (SWEEPER,), {SWEEPER.name: TESTS})

    assert rows(document) == ["|no sweeper|3/5|test five|`lost` 24 under kill head|"]


def test_a_run_of_the_real_stack_keeps_what_the_tests_have_noticed(document: Path) -> None:
    update(document, (SWEEPER,), {SWEEPER.name: STACK})

    assert rows(document) == [
        "|no sweeper|19/20|test four|`lost` 7 under kill head|",
        f"|{SAME}|20/20|simulation||",
    ]


def test_a_new_mutant_takes_its_place_in_the_order_of_the_catalog(document: Path) -> None:
    update(document, (FENCE, NEW, SWEEPER), {NEW.name: STACK})

    assert rows(document)[2] == "|new|-|-|`lost` 7 under kill head|"
    names = [row.split("|")[1] for row in rows(document)]
    assert names == ["no fence", SAME, "new", "no sweeper", SAME]


def test_a_run_without_mutants_leaves_the_documents_own_table_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "guarantees.md"
    before = (REPOSITORY / "docs/guarantees.md").read_text(encoding="utf-8")
    path.write_text(before, encoding="utf-8")

    update(path, MUTANTS, {})

    assert path.read_text(encoding="utf-8") == before
    assert rows(path)
