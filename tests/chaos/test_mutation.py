"""The mutation gate's own judgment: only a failed assertion has noticed anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.mutants.mutant import Hurt, Patch, Unfit
from tests.chaos.mutants.mutated import copy_of, run
from tests.chaos.mutants.mutation import together
from tests.chaos.mutants.noticing import by_test

NUM_RUNS = 2
PROBE = "tests/test_of_the_gate.py"
HEAD = "import pytest\n\ndef test_it() -> None:\n    "


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with copy_of(()) as folder:
        yield folder


@pytest.mark.parametrize(
    ("body", "num_caught"),
    [
        pytest.param("assert 1 == 2", NUM_RUNS, id="an assertion"),
        pytest.param(
            "with pytest.raises(ValueError): pass", NUM_RUNS, id="an error that does not come"
        ),
        pytest.param("raise OSError('away')", 0, id="another error"),
        pytest.param("assert 1 == 1", 0, id="nothing"),
    ],
)
def test_only_an_assertion_counts_as_a_failed_test(
    folder: Path, body: str, num_caught: int
) -> None:
    (folder / PROBE).write_text(HEAD + body)
    assert by_test(folder, PROBE, NUM_RUNS) == num_caught


def test_the_gate_names_a_test_that_cannot_be_collected(folder: Path) -> None:
    (folder / PROBE).write_text("import what_nobody_has\n" + HEAD + "pass")
    with pytest.raises(Unfit, match="what_nobody_has"):
        by_test(folder, PROBE, NUM_RUNS)


def test_the_gate_names_a_mutant_that_cannot_be_imported() -> None:
    broken = Patch(
        file="shared/shardline/contract/keys.py",
        old="from __future__ import annotations\n",
        new="import nothing_here\n",
    )
    with pytest.raises(Unfit, match="nothing_here"), copy_of((broken,)):
        pass


def test_chaos_runs_without_a_mutant_share_one_run_per_stack() -> None:
    one = Hurt(faults="a,b", counts=("lost",), minutes=0.5)
    other = Hurt(faults="b,c", counts=("stuck",), minutes=0.5)
    two_heads = Hurt(faults="a", counts=("lost",), replicas=2)
    joined, alone = together([one, two_heads, other, one])
    assert (joined.faults, joined.minutes) == ("a,b,c", 1.0)
    assert (alone.faults, alone.replicas) == ("a", 2)


def test_the_copy_for_a_mutant_holds_all_that_the_users_load_reads(folder: Path) -> None:
    told = run(
        folder,
        "-c",
        "from tests.chaos.stack.local_start import composed_redis; print(*composed_redis())",
        timeout_s=60,
    )
    assert told.split() == ["maxmemory", "maxmemory-policy"]
