"""A stage's settings from the environment. Knows no server."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr

from shardline.base.config import Times
from shardline.base.errors import Invalid
from shardline.contract.lanes import MAX_LANES
from shardline.host.private import user_folder
from shardline_fleet.settings_profile import ProfiledSettings

PLANNED = "planned"
PEER = "peer:"
"""Before the name of a model that another worker of the fleet has."""


class StageSettings(ProfiledSettings):
    """One stage: which model, which layers, on which device."""

    model: str = Field(
        description="folder or hub id of a causal LM, safetensors only; peer:NAME: copied from a worker of the fleet"
    )
    model_revision: str | None = Field(None, description="the hub's commit, tag or branch; default: its main branch")
    model_name: str | None = Field(
        None, description="name that requests use; default: the folder's or the id's last part"
    )
    further_models: str | None = Field(
        None,
        description="other models that a worker of a fleet may serve in place of this one, NAME=FOLDER with commas; "
        "only with SHARDLINE_LAYERS=planned",
    )
    layers: str | None = Field(
        None,
        description="this stage's layers such as 0-3, counted as people count; planned: those that its fleet's plan "
        "gives it; default: by place",
    )
    place: int = Field(0, ge=0, description="place in the chain, 0 is the head; used when layers is not set")
    num_stages: int = Field(1, ge=1, description="stages of the pipeline; used when layers is not set")
    split: str | None = Field(
        None, description="layers of all stages by hand, such as 0-5,6-7; even, or not set: an equal share of them"
    )
    pipeline: str | None = Field(
        None, description="name of this head's pipeline; default: made from the host and the device"
    )
    worker_name: str | None = Field(None, description="Celery worker name before the @; default: pipeline.place")
    device: str = Field(
        "cpu:0",
        description="cpu:0-3, cuda:0, a GPU's UUID, xpu:0, mps; a kind alone such as cpu or cuda: a free one of it; "
        "auto: the best free one",
    )
    stage_cores: int | None = Field(
        None, ge=1, description="cores that a device of cpu or auto takes; default: all that are free"
    )
    tp: int = Field(
        1,
        ge=1,
        le=64,
        description="ranks of a stage on cores (tensor parallel): processes that divide its cores and all its layers",
    )
    device_module: str | None = Field(
        None, description="Python module that registers a further device type with torch, such as torch_npu"
    )
    cpu_parts: str = Field(
        "", description="parts that a stage on an accelerator keeps on the CPU: embedding, output, or both with a comma"
    )
    gpu_products: Literal["torch", "triton"] = Field(
        "torch", description="what computes linear layers and RMSNorms on a GPU; triton: our kernels, for exact rows"
    )
    cuda_graphs: bool = Field(
        False, description="record decode steps on a CUDA or ROCm GPU as graphs, at start, and replay them"
    )
    device_watts: float | None = Field(
        None,
        gt=0,
        description="what the device draws while it computes, W, instead of what is measured or in our table",
    )
    device_shared: bool = Field(False, description="let stages share cores (more stages than cores)")
    dtype: Literal["float32", "bfloat16", "float16", "int8"] = Field(
        "float32",
        description="of weights, activations and KV; int8: on a CPU, of weights and inputs of products; "
        "the rest bfloat16",
    )
    seats: int = Field(64, ge=1, le=4096, description="places in the batch: Celery's -c")
    interactive_seats: int = Field(
        default_factory=lambda settings: settings["seats"] // 8,
        ge=0,
        le=4096,
        description="places besides, only for jobs of priority 0 to 3; default: an eighth of the seats",
    )
    token_budget: int = Field(256, ge=16, le=65536, description="packed rows of one step at most")
    kv_mib: int | None = Field(
        None,
        ge=1,
        description="KV memory of this stage, MiB; default: seats times context, at most the share of what is free",
    )
    kv_share: float = Field(
        0.4, gt=0, le=0.9, description="part of the memory that is free after loading that KV takes, without KV_MIB"
    )
    memory_mib: int | None = Field(
        None, ge=1, description="memory of the device that this stage takes at most, MiB; default: all that is free"
    )
    kv_offload_mib: int = Field(
        0,
        ge=0,
        description="MiB outside the KV pool for the KV of preempted jobs, if the prefix cache is on; 0: none",
    )
    kv_offload_dir: Path | None = Field(None, description="folder of a file for it; default: the host's memory")
    streamed_layers: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        0,
        description="layers whose weights come again in every step: on cores from a file, to an accelerator from the "
        "host's memory; auto: as few as make weights and KV fit",
    )
    streamed_layers_dir: Path | None = Field(None, description="folder of that file of cores; default: the cache's")
    stall_s: float = Field(
        Times().stall_s, ge=5, description="a head takes a stage for hung whose step takes longer; times the time scale"
    )
    prefix_cache: bool = Field(True, description="jobs of a tenant share the KV of equal first tokens, 64 at a time")
    prompt_lookup: int = Field(
        16,
        ge=0,
        le=64,
        description="rows of a step up to which text that repeats the prompt or itself is guessed; 0: never",
    )
    adapters_dir: Path | None = Field(
        None, description="folder of LoRA adapters in PEFT's format, a subfolder for each; the same files on all stages"
    )
    adapters: int = Field(16, ge=1, le=4096, description="adapters in memory, and of running jobs, at most")
    lanes: int | None = Field(
        None, ge=1, le=MAX_LANES, description="steps in flight; default: one for each stage, more where links take long"
    )
    lock_dir: Path = Field(
        default_factory=lambda: user_folder() / "locks", description="device locks; containers of one user may share it"
    )
    run_dir: Path = Field(default_factory=lambda: user_folder() / "run", description="ipc sockets")
    cache_dir: Path = Field(Path.home() / ".cache" / "shardline", description="checksums of weights")
    hop_transport: Literal["ipc", "tcp"] = Field("ipc", description="ipc on one host, tcp between hosts")
    hop_activations: Literal["same", "int8"] = Field(
        "same",
        description="what a head's pipeline sends from one machine to another; int8: half the bytes of bfloat16, and "
        "results are not exact",
    )
    hop_host: str = Field(
        default_factory=socket.gethostname, description="name or address under which other stages reach this one"
    )
    hop_bind: str = Field("0.0.0.0", description="address on which this stage listens for other stages")  # noqa: S104 (hosts of a stack)
    hop_ports: str | None = Field(
        None, description="ports that a firewall lets through, such as 7600-7631; default: any free one"
    )
    hop_secret_key: SecretStr | None = Field(
        None, description="key of hops over tcp, the same on all stages: 64 hexadecimal digits"
    )
    hop_insecure: bool = Field(False, description="hops over tcp without a key: for networks that nobody else reaches")

    @property
    def is_planned(self) -> bool:
        """Whether the layers come from the plan of the fleet."""
        return self.layers == PLANNED

    @property
    def asks_peers(self) -> bool:
        """Whether some model comes from another worker."""
        return any(each.model.startswith(PEER) for each in self.every_model)

    def streams_on(self, *, cores: bool) -> bool:
        """Whether it streams as many layers as its memory does not hold, so that a plan may count on it. Graphs of an
        accelerator hold none."""
        return self.streamed_layers == "auto" and (cores or not self.cuda_graphs)

    @property
    def streaming_folder(self) -> Path:
        """Where the weights of streamed layers lie."""
        return self.streamed_layers_dir or self.cache_dir

    @property
    def memory_bytes(self) -> int | None:
        """The limit of its memory."""
        return None if self.memory_mib is None else self.memory_mib << 20

    @property
    def times(self) -> Times:
        """The protocol's, with the stall that this head's processor asks for."""
        return super().times.model_copy(update={"stall_s": self.stall_s * self.time_scale})

    @property
    def every_model(self) -> list[StageSettings]:
        """These settings for each model that the worker may serve, this one first. Raises Invalid."""
        found = {self.name: self}
        for part in filter(None, (self.further_models or "").split(",")):
            name, _, model = part.strip().rpartition("=")
            update = {"model": model, "model_name": name or None, "model_revision": None}
            other = self.model_copy(update=update)
            if other.name in found:
                raise Invalid("SHARDLINE_FURTHER_MODELS", f"{other.name} is named twice", "Write NAME=FOLDER")
            found[other.name] = other
        return list(found.values())

    @property
    def name(self) -> str:
        """The model's name in requests and queues."""
        return self.model_name or Path(self.model.removeprefix(PEER)).name
