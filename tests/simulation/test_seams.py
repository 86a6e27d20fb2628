"""What the simulation replaces, and that nothing else of the product is missing in it."""

from __future__ import annotations

import threading
import time
from types import ModuleType

import pytest
from sqlalchemy.sql import Executable

from shardline.store import models, pipelines
from shardline_server.store import claims, crashes, ends, leases, outbox, sweeps
from tests.simulation.connection import TWINS
from tests.simulation.seams import SEAMS

MAX_SEAMS = 5
STANDARD_LIBRARY = (threading, threading.Thread, time)
OF_OTHERS = {sweeps.COUNTS, models.CHOICES, models.NEW, models.REGISTER_ADAPTERS}
"""What these modules have besides: statements that neither heads without adapters nor simulated
loops of relays send, one of the command line's, and a part of one."""


def test_the_simulation_patches_at_most_five_names_and_none_of_the_product() -> None:
    assert len(SEAMS) <= MAX_SEAMS
    assert [(target, name) for target, name, _ in SEAMS if target not in STANDARD_LIBRARY] == []


@pytest.mark.parametrize(
    "module", [claims, crashes, ends, leases, models, outbox, pipelines, sweeps]
)
def test_each_statement_of_heads_and_relays_has_a_twin(module: ModuleType) -> None:
    constants = {
        name: value for name, value in vars(module).items() if isinstance(value, Executable)
    }
    assert constants

    assert [
        name for name, statement in constants.items() if statement not in {*TWINS, *OF_OTHERS}
    ] == []
