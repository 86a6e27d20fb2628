"""Builds the CPU kernels, all sources into one library per instruction set. Knows no tensor.

`python -m services.stage.kernels.build` builds every variant; a library that was built before is
used without a compiler. The file's name holds a hash of sources and flags, so an old build is never
loaded. The bits that the kernels compute do not depend on the compiler: fused multiply-adds are
spelled out and contraction is off.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

HERE = Path(__file__).parent
_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wno-maybe-uninitialized",
)
MARCH = {
    "amx": ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    "avx512_bf16": ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
    "avx512_vnni": ("-march=x86-64-v4", "-mavx512vnni"),
    "avx512": ("-march=x86-64-v4",),
    "avx2": ("-march=x86-64-v3",),
}
"""The compiler's flags for each instruction set that a variant is built for, the widest first."""


class KernelSettings(BaseSettings):
    """Tells where the kernels are stored, and whether they are used."""

    model_config = SettingsConfigDict(env_prefix="SHARDLINE_", frozen=True, extra="ignore")

    kernel: Literal["auto", "off"] = Field(
        "auto",
        description="auto, or off: "
        "attention through torch's SDPA instead of our kernels, and exact=false",
    )
    kernel_dir: Path = Field(
        Path(__file__).parents[3] / ".build",
        description="folder of the built kernels; default: `.build` in the repository",
    )


def library_path(
    isa: str, folder: Path, sources: Path = HERE, defined: tuple[str, ...] = ()
) -> Path:
    """Returns where the library of these sources and flags is stored once it is built."""
    flags = " ".join((*_FLAGS, *MARCH[isa], *defined))
    text = b"".join(
        file.read_bytes() for file in sorted((*sources.glob("*.cpp"), *sources.glob("*.h")))
    )
    digest = hashlib.sha256(text + flags.encode()).hexdigest()[:16]
    return folder / f"kernel-{isa}-{digest}.so"


def build(isa: str, folder: Path, sources: Path = HERE, defined: tuple[str, ...] = ()) -> Path:
    """Compiles one variant of a folder of sources, with `defined` in addition to its own flags;
    returns its path.

    A library that is there is not compiled again. Several processes may call this at the same time:
    one builds, the others wait. Raises OSError without a compiler, or with the compiler's own
    message when it fails.
    """
    path = library_path(isa, folder, sources, defined)
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "kernel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile((*_FLAGS, *MARCH[isa], *defined), sorted(sources.glob("*.cpp")), path)
    return path


def _compile(flags: tuple[str, ...], sources: list[Path], path: Path) -> None:
    compiler = shlex.split(
        os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or ""
    )
    if not compiler:
        raise OSError(
            "no C++ compiler: install g++, or put a built library into SHARDLINE_KERNEL_DIR"
        )
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, ThreadPoolExecutor() as pool:
        linked = Path(folder, path.name)
        objects = [str(Path(folder, source.stem)) + ".o" for source in sources]
        pairs = zip(sources, objects, strict=True)
        list(
            pool.map(lambda pair: _run(*compiler, *flags, "-c", str(pair[0]), "-o", pair[1]), pairs)
        )
        # Linked without -fopenmp: the symbols must resolve to the OpenMP runtime that torch loaded.
        _run(*compiler, "-shared", "-Wl,-z,now", *objects, "-o", str(linked))
        linked.replace(path)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")


def main() -> None:
    """Builds every variant, so that an image runs on any x86-64 processor."""
    folder = KernelSettings().kernel_dir
    for isa in MARCH:
        sys.stdout.write(f"{build(isa, folder)}\n")


if __name__ == "__main__":
    main()
