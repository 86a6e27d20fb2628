"""llama.cpp: its server, built for this machine from the sources in llama-cpp-python's sdist. bf16,
int8 (q8_0)."""

from __future__ import annotations

import tarfile
from pathlib import Path

from tests.benchmarks.peers.peer import NUM_CORES, Command, Environment, Unavailable, model

SOURCE = "llama-cpp-python==0.3.36"
TOOLS = ("scikit-build-core", "cmake", "ninja", "numpy", "gguf")
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_ALL_WARNINGS=OFF",
)
FORMATS = {"bf16": "bf16", "int8": "q8_0"}
SLOTS = 64
SLOT_TOKENS = {"bf16": 384, "int8": 1600}
"""Enough for what `PLAN` asks of each."""

TILES = "ggml/src/ggml-cpu/amx/mmq.cpp"
LOAD = "    _tile_loadconfig(&tc);"
BARRIER = '    __asm__ volatile("" :: "m"(tc) : "memory");\n'
"""gcc 12's intrinsic says it reads 8 bytes of the tiles' configuration: without this the others are
never written, and the next tile instruction is illegal."""


class LlamaCpp:
    """See `Peer`."""

    name = "llamacpp"
    precisions: tuple[str, ...] = ("bf16", "int8")

    def __init__(self) -> None:
        self._environment = Environment(self.name)
        self._folder = self._environment.folder

    def install(self) -> None:
        """See `Peer`. The server is compiled: 15 to 30 minutes on two cores, once."""
        self._environment.create()
        done = self._environment.once("installed", "\n".join((SOURCE, *OPTIONS, BARRIER)))
        if not done.is_there:
            self._environment.install(*TOOLS)
            self._build(self._sources())
            done.leave()

    def convert(self, precision: str) -> None:
        """See `Peer`."""
        kind = FORMATS[precision]
        done = self._environment.once(f"converted-{kind}", str(model("bf16")))
        if not done.is_there:
            script = "tests.benchmarks.peers.runners.to_gguf"
            out = str(self._folder / f"{kind}.gguf")
            self._environment.call(
                [str(self._environment.python), "-m", script, str(model("bf16")), out, kind]
            )
            done.leave()

    def command(self, precision: str) -> Command:
        """See `Peer`. Each slot has KV of its own: one pool for all would make each sequence look
        at the others'."""
        server = self._folder / "build" / "bin" / "llama-server"
        threads = str(NUM_CORES)
        argv = [
            str(server),
            "-m",
            str(self._folder / f"{FORMATS[precision]}.gguf"),
            "-t",
            threads,
            "-tb",
            threads,
        ]
        slots = [
            "-np",
            str(SLOTS),
            "-c",
            str(SLOTS * SLOT_TOKENS[precision]),
            "-b",
            "2048",
            "-ub",
            "512",
        ]
        return Command(
            module="llama_server",
            python=self._environment.python,
            settings={
                "argv": [*argv, *slots],
                "versions": {"llama.cpp of llama-cpp-python": SOURCE.split("==")[1]},
            },
        )

    def _sources(self) -> Path:
        folder = self._folder / "src"
        if not any(folder.glob("*.tar.gz")):
            only = ("--no-deps", "--no-binary", "llama-cpp-python", "--no-build-isolation")
            self._environment.pip("download", *only, SOURCE, "-d", str(folder))
        archive = next(folder.glob("*.tar.gz"))
        if not any(folder.glob("*/vendor/llama.cpp")):
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
        sources = next(folder.glob("*/vendor/llama.cpp"))
        tiles = sources / TILES
        text = tiles.read_text()
        if LOAD not in text:
            raise Unavailable(f"{TILES} loads its tiles in another way")
        if BARRIER not in text:
            tiles.write_text(text.replace(LOAD, BARRIER + LOAD))
        return sources

    def _build(self, sources: Path) -> None:
        programs = self._folder / "bin"
        cmake = str(programs / "cmake")
        build = str(self._folder / "build")
        ninja = f"-DCMAKE_MAKE_PROGRAM={programs / 'ninja'}"
        self._environment.call(
            [cmake, "-S", str(sources), "-B", build, "-G", "Ninja", ninja, *OPTIONS]
        )
        self._environment.call(
            [cmake, "--build", build, "-j", str(NUM_CORES), "--target", "llama-server"]
        )
