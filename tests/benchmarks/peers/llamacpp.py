"""llama.cpp: its libraries as node-llama-cpp's package has them, with kernels for each kind of
processor; GGUF files are written here. fp32, bf16, int8 (Q8_0), int4 (Q4_0)."""

from __future__ import annotations

import json
import platform
import shutil
import tarfile
from pathlib import Path

from gguf import GGMLQuantizationType

from tests.benchmarks.peers.peer import (
    NUM_CORES,
    Checkpoint,
    Command,
    Environment,
    Unavailable,
    model,
)
from tests.benchmarks.perplexity import WINDOW
from tests.gguf_models import write_gguf

RELEASE = "3.21.1"
PLATFORMS = {"x86_64": "linux-x64", "aarch64": "linux-arm64"}
FORMATS = {
    "bf16": GGMLQuantizationType.BF16,
    "fp32": GGMLQuantizationType.F32,
    "int8": GGMLQuantizationType.Q8_0,
    "int4": GGMLQuantizationType.Q4_0,
}
OTHERS = {"int4": {"token_embd": GGMLQuantizationType.Q8_0}}
"""llama.cpp's own files of 4 bits have more for the embedding, too."""
SLOTS = 64
SLOT_TOKENS = {"int8": 1600}
"""Enough for what `PLAN` asks, else 384."""


class LlamaCpp:
    """See `LogitsPeer`."""

    name = "llamacpp"
    precisions: tuple[str, ...] = tuple(FORMATS)

    def __init__(self, checkpoint: Checkpoint = model) -> None:
        self._checkpoint = checkpoint
        self._environment = Environment(self.name)
        self._folder = self._environment.folder

    def install(self) -> None:
        """See `Peer`. Nothing is compiled."""
        package = f"@node-llama-cpp/{PLATFORMS.get(platform.machine(), 'none')}@{RELEASE}"
        done = self._environment.once("installed", package)
        if done.is_there:
            return
        if shutil.which("npm") is None:
            raise Unavailable("npm is missing, whose registry has llama.cpp's libraries")
        shutil.rmtree(self._folder / "package", ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._environment.call(["npm", "pack", package, "--pack-destination", str(self._folder)])
        (archive,) = self._folder.glob(f"*{RELEASE}.tgz")
        with tarfile.open(archive) as packed:
            packed.extractall(self._folder, filter="data")
        done.leave()

    def convert(self, precision: str) -> None:
        """See `Peer`."""
        self.file(precision)

    def file(self, precision: str) -> Path:
        """The GGUF file, written if it is not there."""
        folder, kind = self._checkpoint(precision), FORMATS[precision]
        path = self._folder / f"{folder.name}-{kind.name}.gguf"
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(".part")
            write_gguf(folder, draft, kind=kind, others=OTHERS.get(precision))
            draft.rename(path)
        return path

    def command(self, precision: str) -> Command:
        """See `Peer`. Each sequence has KV of its own: one pool for all would make each look at
        the others'."""
        return self._runner("llama_batches", precision, SLOTS, SLOT_TOKENS.get(precision, 384))

    def reader(self, precision: str) -> Command:
        """See `LogitsPeer`."""
        return self._runner("llama_logits", precision, 1, WINDOW)

    def _runner(self, module: str, precision: str, num_sequences: int, num_tokens: int) -> Command:
        (libraries,) = (self._folder / "package" / "bins").iterdir()
        said = json.loads((libraries / "_nlcBuildMetadata.json").read_text())
        release = said["buildOptions"]["llamaCpp"]["release"]
        return Command(
            module=module,
            settings={
                "libraries": str(libraries),
                "release": f"{release} of node-llama-cpp {RELEASE}",
                "model": str(self.file(precision)),
                "sequences": num_sequences,
                "sequence_tokens": num_tokens,
                "threads": NUM_CORES,
            },
        )
