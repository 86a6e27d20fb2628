"""The mutation gate's own judgment: only a failed assertion has noticed anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.mutant import Hurt, Patch
from tests.faults.mutated import Unfit, copy_of, run
from tests.faults.mutation import together
from tests.faults.noticing import by_test

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
        pytest.param("with pytest.raises(ValueError): pass", NUM_RUNS, id="an error that does not come"),
        pytest.param("raise OSError('away')", 0, id="another error"),
        pytest.param("assert 1 == 1", 0, id="nothing"),
    ],
)
def test_given_a_test_when_it_fails_then_only_an_assertion_counts(folder: Path, body: str, num_caught: int) -> None:
    (folder / PROBE).write_text(HEAD + body)
    assert by_test(folder, PROBE, NUM_RUNS) == num_caught


def test_given_a_test_that_cannot_be_collected_when_run_then_the_gate_says_so(folder: Path) -> None:
    (folder / PROBE).write_text("import what_nobody_has\n" + HEAD + "pass")
    with pytest.raises(Unfit, match="what_nobody_has"):
        by_test(folder, PROBE, NUM_RUNS)


def test_given_a_mutant_that_cannot_be_imported_when_copied_then_the_gate_says_so() -> None:
    broken = Patch(
        file="shared/shardline/keys.py", old="from __future__ import annotations\n", new="import nothing_here\n"
    )
    with pytest.raises(Unfit, match="nothing_here"), copy_of((broken,)):
        pass


def test_given_many_chaos_runs_when_done_without_a_mutant_then_each_stack_runs_once_with_all_its_faults() -> None:
    one, other = Hurt(faults="a,b", counts=("lost",), minutes=0.5), Hurt(faults="b,c", counts=("stuck",), minutes=0.5)
    two_heads = Hurt(faults="a", counts=("lost",), replicas=2)
    joined, alone = together([one, two_heads, other, one])
    assert (joined.faults, joined.minutes) == ("a,b,c", 1.0)
    assert (alone.faults, alone.replicas) == ("a", 2)


def test_given_a_copy_when_a_users_load_is_raised_in_it_then_nothing_that_it_reads_is_missing(folder: Path) -> None:
    told = run(
        folder, "-c", "from tests.faults.own_world import composed_redis; print(*composed_redis())", timeout_s=60
    )
    assert told.split() == ["maxmemory", "maxmemory-policy"]
