"""`make test` on two processes: a file stays in one of them, because its group is made before
pytest-xdist reads it."""

from __future__ import annotations

import pytest

from tests.repository import REPOSITORY

CONFTEST = REPOSITORY / "tests" / "conftest.py"


def test_the_group_of_a_test_is_its_file(request: pytest.FixtureRequest) -> None:
    group = request.node.get_closest_marker("xdist_group")
    assert group is not None
    assert group.args == ("tests/unit/test_parallel.py",)


def test_groups_are_made_before_xdist_reads_them(pytestconfig: pytest.Config) -> None:
    """In `make check` this runs in such a process."""
    called = pytestconfig.hook.pytest_collection_modifyitems.get_hookimpls()[::-1]
    (ours,) = [
        place
        for place, each in enumerate(called)
        if each.function.__code__.co_filename == str(CONFTEST)
    ]
    readers = [
        place
        for place, each in enumerate(called)
        if type(each.plugin).__name__ == "WorkerInteractor"
    ]
    assert bool(readers) is hasattr(pytestconfig, "workerinput")
    assert all(ours < place for place in readers)


def test_ids_sent_by_xdist_name_their_groups(
    request: pytest.FixtureRequest, pytestconfig: pytest.Config
) -> None:
    """The end of an id says what stays together; a pytest that pytest-xdist does not know keeps ids
    elsewhere."""
    if pytestconfig.getoption("loadgroup", default=False):
        assert request.node.nodeid.endswith("@tests/unit/test_parallel.py")
    else:
        assert "@" not in request.node.nodeid
