"""The simulator as a command: what a person sees, what a program reads, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardline.cli.commands import cli
from shardline_fleet.simulator import __main__ as command
from shardline_fleet.simulator.datasheets import DATASHEETS
from tests.repository import REPOSITORY

FLEET = """
model: {num_hidden_layers: 4, hidden_size: 64, intermediate_size: 256,
  num_attention_heads: 4, vocab_size: 1000}
cells: [{devices: {l4: 1}}]
load: {jobs: 8, prompt: 16, output: 8}
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    return path


def test_a_person_sees_tables_and_a_plot(fleet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.simulate(fleet, svg=fleet.with_suffix(".svg"), json=False)
    shown = capsys.readouterr().out
    assert "1 devices in 1 cells: 1 pipelines, 1 stages" in shown
    assert "█" in shown
    assert "Redis" in shown
    assert fleet.with_suffix(".svg").read_text().startswith("<svg")


def test_a_program_reads_the_same(fleet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.simulate(fleet, svg=None, json=True)
    read = json.loads(capsys.readouterr().out)
    assert read["jobs"] == 8
    assert read["fleet"]["pipelines"] == 1


def test_the_command_runs_the_simulator_of_the_repository(
    fleet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    fleet.write_text("model: [")
    done = CliRunner().invoke(cli, ["simulate", str(fleet)])
    assert done.exit_code == 2


def test_the_command_works_in_any_folder(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(fleet.parent)
    assert CliRunner().invoke(cli, ["simulate", str(fleet)]).exit_code == 0


def test_each_datasheet_names_its_document() -> None:
    assert all(sheet.document for sheet in DATASHEETS.values())
    assert {sheet.dtype for sheet in DATASHEETS.values()} == {"bfloat16", "float16"}
