"""The mutants: the product broken on purpose, one rule at a time, and what must notice.

A patch replaces text that stands exactly once in its file (`tests/unit/test_mutants.py` checks that
the list does not rot). `mutation` runs the list.
"""

from __future__ import annotations

from typing import Final

from tests.chaos.mutants import door_mutants, row_mutants, stage_mutants, tenant_mutants
from tests.chaos.mutants.mutant import Mutant

MUTANTS: Final[tuple[Mutant, ...]] = (
    *row_mutants.MUTANTS,
    *stage_mutants.MUTANTS,
    *door_mutants.MUTANTS,
    *tenant_mutants.MUTANTS,
)
