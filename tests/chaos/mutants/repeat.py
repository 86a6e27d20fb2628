"""A pytest plugin: every collected test runs MUTANT_RUNS times. Loaded by `mutation` with -p."""

from __future__ import annotations

import os

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One more parameter that the test does not see."""
    metafunc.fixturenames.append("mutant_run")
    metafunc.parametrize(
        "mutant_run", [f"run{number}" for number in range(int(os.environ["MUTANT_RUNS"]))]
    )
