"""A share of the matrix of exact rows: the processor's own instruction set, and one below, in
processes of their own.

All of it: `python -m tests.conformance`. Without AMX no number of rows changes a bit that we know
of.
"""

from __future__ import annotations

import pytest

from tests.conformance.matrix import Cell, offered_isas
from tests.pinned import own_cores

NUM_PROMPTS = 24
OFFERED = offered_isas()


@pytest.mark.parametrize(
    "cell",
    [
        Cell(isa=OFFERED[-1], model="clerk", dtype="bfloat16", threads=1),
        Cell(isa=OFFERED[-1], model="wide", dtype="bfloat16", threads=1),
        Cell(isa=OFFERED[0], model="clerk", dtype="float32", threads=1),
        Cell(isa=OFFERED[0], model="wide", dtype="int8", threads=1),
        Cell(isa=OFFERED[0], model="wide", dtype="int4", threads=1),
    ],
    ids=str,
)
def test_jobs_have_the_same_bits_in_batches_of_any_size(cell: Cell) -> None:
    cores = own_cores(cell.threads)
    verdicts = list(cell.verdicts(prompts=NUM_PROMPTS, stages=(1, 2), cores=cores))

    assert [verdict.stages for verdict in verdicts] == [1, 2]
    assert all(verdict.exact and verdict.is_held for verdict in verdicts), list(map(str, verdicts))
