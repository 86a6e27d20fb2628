"""The kernel's build: once per source and instruction set, reused without a compiler, one OpenMP
runtime."""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from services.stage.kernels.build import HERE, MARCH, KernelSettings, build, library_path
from services.stage.kernels.kernel import load, supported_isas

SUMS = r"(sums_of_rows|tile_sums)<"
"""Functions that read a block's weights."""
COUNTING_COMPILER = """#!/bin/sh
echo "$*" >> {log}
while [ "$1" != -o ]; do shift; done
echo built > "$2"
"""


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_workers_that_start_together_build_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a compiler that notes each call
    log = tmp_path / "log"
    compiler = tmp_path / "compiler"
    compiler.write_text(COUNTING_COMPILER.format(log=log))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))

    # When several workers ask for the same variant
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: build("avx2", tmp_path / "kernels"), range(8)))

    # Then each source was compiled once, and they were linked once, and only the finished library
    # lies there
    assert len(log.read_text().splitlines()) == len(list(HERE.glob("*.cpp"))) + 1
    assert {path.read_text() for path in paths} == {"built\n"}
    assert {path.suffix for path in (tmp_path / "kernels").iterdir()} == {".so", ".lock"}


@pytest.mark.parametrize(
    ("limit", "widest"),
    [
        ("AVX2", "avx2"),
        ("AVX512_CORE", "avx512"),
        ("AVX512_CORE_VNNI", "avx512_vnni"),
        ("AVX512_CORE_BF16", "avx512_bf16"),
        ("AVX10_1_512_AMX", "amx"),
        ("DEFAULT", "amx"),
    ],
)
def test_onednns_limit_holds_for_the_kernels_too(
    limit: str, widest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = supported_isas()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)

    allowed = list(MARCH)[list(MARCH).index(widest) :]
    assert supported_isas() == [isa for isa in everything if isa in allowed]


@pytest.mark.usefixtures("no_compiler")
def test_a_built_library_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isas = supported_isas()
    assert isas, "these tests need x86-64 with AVX2"
    built = library_path(isas[0], KernelSettings().kernel_dir)
    shutil.copy(built, tmp_path)
    monkeypatch.setenv("SHARDLINE_KERNEL_DIR", str(tmp_path))
    kernel = load()
    assert kernel is not None
    assert kernel.path.parent == tmp_path


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_sdpa_serves_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDLINE_KERNEL_DIR", str(tmp_path / "empty"))
    with capture_logs() as logs:
        assert load() is None
    assert "install g++" in logs[0]["reason"]


def test_a_failing_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "sh -c 'echo no such flag >&2; exit 1'")
    with pytest.raises(OSError, match="no such flag"):
        build("avx2", tmp_path)


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLINE_KERNEL", "off")
    with capture_logs() as logs:
        assert load() is None
    assert logs[0]["reason"] == "SHARDLINE_KERNEL=off"


def test_it_shares_the_openmp_runtime_of_torch() -> None:
    assert load() is not None
    mapped = {
        line.split(maxsplit=5)[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "omp" in line
    }
    runtimes = {
        Path(path)
        for path in mapped
        if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))
    }
    assert {path.parent for path in runtimes} == {Path(torch.__file__).parent / "lib"}
    assert len(runtimes) == 1


@pytest.mark.parametrize("isa", MARCH)
def test_products_fetch_weights_ahead(isa: str) -> None:
    # A compiler may leave out what changes nothing but the time that a product takes
    library = build(isa, KernelSettings().kernel_dir)
    listing = subprocess.run(
        ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", str(library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    functions = dict(part.partition("\n")[::2] for part in listing.split("\n\n"))
    sums = {name: code for name, code in functions.items() if re.search(SUMS, name)}
    assert sums
    assert [name for name, code in sums.items() if "prefetch" not in code] == []
