"""OpenVINO GenAI: pip wheels, the model converted by optimum-intel, continuous batching. bf16,
fp32, int8 weights."""

from __future__ import annotations

import shutil

from tests.benchmarks.peers.peer import KV_GIB, NUM_CORES, Command, Environment, model

PACKAGES = ("openvino-genai==2026.4.1.0", "openvino==2026.4.1", "optimum-intel[openvino]==2.2.0")
WEIGHTS = {"bf16": "fp32", "fp32": "fp32", "int8": "int8"}
"""The plugin rounds fp32 weights to the precision it computes in when it compiles the model."""
PROPERTIES = {
    "bf16": {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"},
    "fp32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    "int8": {"INFERENCE_PRECISION_HINT": "bf16"},
}
"""int8 leaves KV as the plugin likes it best: u8."""
SCHEDULER = {
    "cache_size": KV_GIB,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 256,
    "dynamic_split_fuse": True,
    "enable_prefix_caching": True,
}


class OpenVino:
    """See `Peer`."""

    name = "openvino"
    precisions: tuple[str, ...] = ("bf16", "fp32", "int8")

    def __init__(self) -> None:
        self._environment = Environment(self.name)

    def install(self) -> None:
        """See `Peer`. torchvision of the index does not load beside torch's CPU build, and
        transformers would try."""
        self._environment.provide(*PACKAGES, with_torch=True, without=["torchvision"])

    def convert(self, precision: str) -> None:
        """See `Peer`."""
        weights = WEIGHTS[precision]
        folder = self._environment.folder / f"models-{weights}"
        done = self._environment.once(f"converted-{weights}", str(model("fp32")))
        if done.is_there:
            return
        shutil.rmtree(folder, ignore_errors=True)
        cli = self._environment.folder / "bin" / "optimum-cli"
        task = ("--task", "text-generation-with-past", "--weight-format", weights)
        self._environment.call(
            [str(cli), "export", "openvino", "--model", str(model("fp32")), *task, str(folder)]
        )
        done.leave()

    def command(self, precision: str) -> Command:
        """See `Peer`."""
        return Command(
            module="openvino_genai",
            python=self._environment.python,
            settings={
                "model": str(self._environment.folder / f"models-{WEIGHTS[precision]}"),
                "scheduler": SCHEDULER,
                "properties": {**PROPERTIES[precision], "INFERENCE_NUM_THREADS": NUM_CORES},
            },
        )
