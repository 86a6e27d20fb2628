"""Whether a warm parent's modules are those on disk: of another version none may be mixed in."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from services.stage.warm_parent import OWN_PACKAGES, source_times
from tests.sources import own_packages


def test_a_module_that_was_written_or_removed_since_its_import_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "written.py"
    file.touch()
    module = ModuleType("services.written")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "services.written", module)
    imported = source_times()
    assert source_times() == imported
    assert str(Path(os.__file__)) not in imported

    os.utime(file, (1, 1))
    assert source_times() != imported
    file.unlink()
    assert source_times()[str(file)] == -1


def test_all_our_packages_are_looked_at() -> None:
    assert own_packages() == OWN_PACKAGES
