"""Builds this folder's extensions with torch's own headers, once for each version of a source and
of torch."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import tempfile
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

HERE = Path(__file__).parent
FOLDER = Path(__file__).parents[2] / ".build"
FLAGS = (
    "-O1",
    "-std=c++20",
    "-fPIC",
    "-shared",
    "-w",
    f"-D_GLIBCXX_USE_CXX11_ABI={torch.compiled_with_cxx11_abi():d}",
)
LIBRARIES = ("-lc10", "-ltorch_cpu")


def build(name: str) -> Path:
    """Returns the path of the library built from `name`.cpp. Processes that call this at the same
    time build it once.

    Raises CalledProcessError if the compiler fails; its words are on standard error.
    """
    source = HERE / f"{name}.cpp"
    digest = hashlib.sha256(
        source.read_bytes() + repr((FLAGS, torch.__version__)).encode()
    ).hexdigest()[:16]
    path = FOLDER / f"{name}-{digest}.so"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(source, path)
    return path


def _compile(source: Path, path: Path) -> None:
    headers = [f"-I{folder}" for folder in include_paths()]
    libraries = [f"-L{folder}" for folder in library_paths()]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder, path.name)
        command = ["g++", *FLAGS, *headers, str(source), "-o", str(built), *libraries, *LIBRARIES]
        subprocess.run(command, check=True)
        built.replace(path)
