"""The mutants' patches fit the product as it is: a list that rots would prove nothing."""

from __future__ import annotations

import ast

import pytest

from tests.chaos.mutants.catalog import MUTANTS
from tests.chaos.mutants.mutant import Mutant, Patch, Unfit
from tests.repository import REPOSITORY


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_patch_of_a_mutant_fits_once_and_its_file_still_parses(mutant: Mutant) -> None:
    sources: dict[str, str] = {}
    for patch in mutant.patches:
        source = sources.get(patch.file) or (REPOSITORY / patch.file).read_text(encoding="utf-8")
        sources[patch.file] = patch.applied(source)
        assert sources[patch.file] != source
    for file, source in sources.items():
        if file.endswith(".sql"):
            continue
        ast.parse(source, filename=file)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_that_must_notice_a_mutant_exist(mutant: Mutant) -> None:
    assert mutant.tests or mutant.is_simulated
    for node in mutant.tests:
        file, _, name = node.partition("::")
        source = (REPOSITORY / file).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in source, node


def test_the_names_of_mutants_differ() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


SOURCE = """
LIMIT = 3


def other(number):
    return number < LIMIT


class Rule:
    def holds(self, number):
        return (
            number < LIMIT
        )
"""


def test_a_patch_changes_its_function_alone_however_its_lines_are_broken() -> None:
    patch = Patch(file="rule.py", within="Rule.holds", old="( number < LIMIT )", new="True")

    assert patch.applied(SOURCE) == SOURCE.replace(
        "(\n            number < LIMIT\n        )", "True"
    )


@pytest.mark.parametrize(
    ("within", "problem"),
    [("", "it has 2 times"), ("Rule.begins", "no Rule.begins"), ("LIMIT", "LIMIT has 0 times")],
)
def test_a_patch_that_does_not_fit_says_where(within: str, problem: str) -> None:
    with pytest.raises(Unfit, match=problem):
        Patch(file="rule.py", within=within, old="number < LIMIT", new="True").applied(SOURCE)
