"""OpenVINO GenAI: pip wheels, the model converted by optimum-intel, continuous batching. bf16,
fp32, weights of int8 and int4."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.benchmarks.peers.peer import (
    KV_GIB,
    NUM_CORES,
    Checkpoint,
    Command,
    Environment,
    model,
)

PACKAGES = ("openvino-genai==2026.4.1.0", "openvino==2026.4.1", "optimum-intel[openvino]==2.2.0")
WEIGHTS = {"bf16": "fp32", "fp32": "fp32", "int8": "int8", "int4": "int4"}
"""The plugin rounds fp32 weights to the precision it computes in when it compiles the model."""
GROUPS = {"int4": ("--group-size", "32")}
"""Of inputs that share a scale: as many as in Q4_0, and a divisor of any hidden size."""
HINT = "bf16" if "avx512_bf16" in Path("/proc/cpuinfo").read_text() else "f32"
"""Without such instructions bf16 is emulated."""
PROPERTIES = {
    "bf16": {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"},
    "fp32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    "int8": {"INFERENCE_PRECISION_HINT": HINT},
    "int4": {"INFERENCE_PRECISION_HINT": HINT},
}
"""int8 and int4 leave KV as the plugin likes it best: u8."""
SCHEDULER = {
    "cache_size": KV_GIB,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 256,
    "dynamic_split_fuse": True,
    "enable_prefix_caching": True,
}


class OpenVino:
    """See `LogitsPeer`."""

    name = "openvino"
    precisions: tuple[str, ...] = tuple(WEIGHTS)

    def __init__(self, checkpoint: Checkpoint = model) -> None:
        self._checkpoint = checkpoint
        self._environment = Environment(self.name)

    def install(self) -> None:
        """See `Peer`. torchvision of the index does not load beside torch's CPU build, and
        transformers would try."""
        self._environment.provide(*PACKAGES, with_torch=True, without=["torchvision"])

    def convert(self, precision: str) -> None:
        """See `Peer`."""
        source, folder = self._checkpoint("fp32"), self._models(precision)
        done = self._environment.once(f"converted-{folder.name}", str(source))
        if done.is_there:
            return
        shutil.rmtree(folder, ignore_errors=True)
        cli = str(self._environment.folder / "bin" / "optimum-cli")
        weights = WEIGHTS[precision]
        form = ("--weight-format", weights, *GROUPS.get(weights, ()))
        task = ("--task", "text-generation-with-past", *form)
        self._environment.call(
            [cli, "export", "openvino", "--model", str(source), *task, str(folder)]
        )
        done.leave()

    def command(self, precision: str) -> Command:
        """See `Peer`."""
        return self._runner("openvino_genai", precision)

    def reader(self, precision: str) -> Command:
        """See `LogitsPeer`."""
        return self._runner("openvino_logits", precision)

    def _models(self, precision: str) -> Path:
        name = self._checkpoint("fp32").name
        return self._environment.folder / f"models-{name}-{WEIGHTS[precision]}"

    def _runner(self, module: str, precision: str) -> Command:
        return Command(
            module=module,
            python=self._environment.python,
            settings={
                "model": str(self._models(precision)),
                "scheduler": SCHEDULER,
                "properties": {**PROPERTIES[precision], "INFERENCE_NUM_THREADS": NUM_CORES},
            },
        )
