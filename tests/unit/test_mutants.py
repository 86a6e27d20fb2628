"""The mutants' patches fit the product as it is: a list that rots would prove nothing."""

from __future__ import annotations

import ast

import pytest

from tests.chaos.mutants.catalog import MUTANTS
from tests.chaos.mutants.mutant import Mutant
from tests.repository import REPOSITORY


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_patch_of_a_mutant_fits_once_and_its_file_still_parses(mutant: Mutant) -> None:
    sources: dict[str, str] = {}
    for patch in mutant.patches:
        source = sources.get(patch.file) or (REPOSITORY / patch.file).read_text(encoding="utf-8")
        assert source.count(patch.old) == 1, f"{patch.file} has {source.count(patch.old)} times {patch.old!r}"
        assert patch.old != patch.new
        sources[patch.file] = source.replace(patch.old, patch.new)
    for file, source in sources.items():
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
