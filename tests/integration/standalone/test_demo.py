"""The demo as a person runs it: exit status 0 only if every figure holds, and nothing is left
behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.standalone.state_dir import StateDir
from tests.repository import REPOSITORY


def test_the_demo_holds_every_figure_and_leaves_nothing_behind(tmp_path: Path) -> None:
    demo = subprocess.run(
        [sys.executable, "-m", "services.standalone", "demo"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    figures = json.loads((tmp_path / ".local" / "demo.json").read_text())
    assert (
        figures["submitted"],
        figures["succeeded"],
        figures["failed"],
        figures["result_rows"],
    ) == (300, 300, 0, 300)
    assert figures["accuracy"] >= 0.95
    assert (figures["doors"], figures["stages"], figures["flower_tasks_seen"]) == (5, 2, 300)
    assert figures["output_tokens_per_s"] > 0
    assert figures["spent"]["energy_j"] > 0
    assert figures["spent"]["cost"] == pytest.approx(figures["spent"]["energy_j"] / 3.6e6 * 0.30)
    assert StateDir(tmp_path / ".local" / "demo").recorded() == {}
