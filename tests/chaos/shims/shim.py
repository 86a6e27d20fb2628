"""Small libraries in C that change what the system tells a process that preloads them. Knows none
of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


def build(source: Path, library: Path) -> str | None:
    """None, or why there is no such library here."""
    compiler = shutil.which("cc")
    if compiler is None:
        return f"no C compiler is installed, to build {source.name}"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    return (
        None if built.returncode == 0 else f"{source.name} cannot be built: {built.stderr[-300:]}"
    )


@contextmanager
def preloaded(libraries: Sequence[Path], environment: Mapping[str, str]) -> Iterator[None]:
    """Every process that is started meanwhile preloads them, besides what it preloads anyway."""
    before = dict(os.environ)
    names = [str(library) for library in libraries]
    os.environ.update(
        {**environment, "LD_PRELOAD": ":".join([*names, *filter(None, [before.get("LD_PRELOAD")])])}
    )
    try:
        yield
    finally:
        for name in (*environment, "LD_PRELOAD"):
            os.environ.pop(name)
            if name in before:
                os.environ[name] = before[name]
