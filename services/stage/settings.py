"""A stage's settings from the environment. Knows no server."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr

from shardline.base.config import Times
from shardline.base.errors import Invalid
from shardline.contract.fleet.lanes import MAX_LANES
from shardline_gguf import is_gguf, stem_of
from shardline_server.host.private import user_folder
from shardline_server.settings_profile import ProfiledSettings

PLANNED = "planned"
PEER = "peer:"
"""Before the name of a model that another worker of the fleet has."""


class StageSettings(ProfiledSettings):
    """One stage: which model, which layers, on which device."""

    model: str = Field(
        description="folder or hub id of a causal LM in safetensors, or a GGUF file; "
        "peer:NAME: copied from another worker of the fleet"
    )
    model_revision: str | None = Field(
        None,
        description="commit, tag or branch of a hub id; only a full commit is fixed; "
        "default: the hub's main branch",
    )
    model_name: str | None = Field(
        None, description="name that requests use; default: last part of the folder or id"
    )
    further_models: str | None = Field(
        None,
        description="other models that a worker of a fleet may serve instead, "
        "NAME=FOLDER with commas",
    )
    layers: str | None = Field(
        None,
        description="this stage's layers, such as 0-3, or planned: from its fleet's plan; "
        "overrides place, stages and split; default: by place",
    )
    place: int = Field(0, ge=0, description="place in the chain; 0 is the head")
    num_stages: int = Field(1, ge=1, description="stages of the pipeline")
    split: str | None = Field(
        None,
        description="layers of all stages, such as 0-5,6-7, or even; "
        "default: equal shares; `make up`: planned",
    )
    pipeline: str | None = Field(
        None,
        description="name of this head's pipeline, unique for each head; "
        "default: from model, host and device, in a fleet from model and worker",
    )
    worker_name: str | None = Field(
        None, description="Celery worker name before the @; default: `pipeline.place`"
    )
    device: str = Field(
        "cpu:0",
        description="what computes: cpu:0-3, cuda:0, a GPU's UUID, xpu:0, mps; "
        "cpu or cuda: a free one; auto: the best free one",
    )
    stage_cores: int | None = Field(
        None,
        ge=1,
        description="cores that the devices cpu and auto take; default: all that are free",
    )
    tp: int = Field(
        1,
        ge=1,
        le=64,
        description="ranks of a stage on cores (tensor parallel): "
        "processes that divide its cores and layers",
    )
    device_module: str | None = Field(
        None,
        description="Python module that registers a further device type with torch, "
        "such as torch_npu",
    )
    cpu_parts: str = Field(
        "",
        description="parts that a stage on an accelerator keeps on the CPU: embedding, output, "
        "or both with a comma; tied weights need both",
    )
    gpu_products: Literal["auto", "torch", "triton"] = Field(
        "auto",
        description="what computes linear layers and RMSNorms on a GPU: torch, "
        "or triton for exact rows; auto: triton where it serves",
    )
    cuda_graphs: bool | None = Field(
        None,
        description="record steps on CUDA or ROCm as graphs and replay them; "
        "not with SDPA, mixtures, CPU parts or streamed layers; default: where that can be",
    )
    device_watts: float | None = Field(
        None,
        gt=0,
        description="power of the device while it computes, W; "
        "default: measured, else from a table",
    )
    device_shared: bool = Field(False, description="let stages share cores; slower")
    nice: int = Field(
        10,
        ge=0,
        le=19,
        description="nice value of compute threads on cores: others wait less",
    )
    dtype: Literal["float32", "bfloat16", "float16", "int8", "int4"] = Field(
        "float32",
        description="of weights, activations and KV: float32, bfloat16, float16 (GPU), "
        "int8 or int4 (CPU: weights, the rest bfloat16)",
    )
    seats: int = Field(64, ge=1, le=4096, description="sequences in the batch: Celery's -c")
    interactive_seats: int = Field(
        default_factory=lambda settings: settings["seats"] // 8,
        ge=0,
        le=4096,
        description="further seats, only for jobs of priority 0 to 3; "
        "default: an eighth of the seats",
    )
    token_budget: int = Field(
        256, ge=16, le=65536, description="token rows of one step, prefill and decode together"
    )
    kv_mib: int | None = Field(
        None,
        ge=1,
        description="KV memory of this stage, MiB; default: seats times context, "
        "at most the share of free memory",
    )
    kv_share: float = Field(
        0.4,
        gt=0,
        le=0.9,
        description="part of the memory free after loading that KV takes without "
        "`SHARDLINE_KV_MIB`; `make up` divides 0.6 among its stages",
    )
    memory_mib: int | None = Field(
        None, ge=1, description="device memory for weights and KV, MiB; default: all that is free"
    )
    kv_offload_mib: int = Field(
        0,
        ge=0,
        description="MiB outside the KV pool for the KV of preempted jobs, on every stage; "
        "needs the prefix cache; 0: it is computed again",
    )
    kv_offload_dir: Path | None = Field(
        None, description="folder of a file for it, on CPU; default: the host's memory, for GPUs"
    )
    streamed_layers: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        0,
        description="layers whose weights are read in every step, "
        "from a file (cores) or host memory (accelerators); auto: as few as fit",
    )
    streamed_layers_dir: Path | None = Field(
        None,
        description="folder of that file; its disk decides the speed; "
        "default: `SHARDLINE_CACHE_DIR`",
    )
    stall_s: float = Field(
        Times().stall_s,
        ge=5,
        description="a stage whose step takes longer (times the time scale) is restarted as hung; "
        "at least five full prefill steps; stages warn at half of it; set on the head",
    )
    prefix_cache: bool = Field(
        True,
        description="jobs of a tenant share the KV of equal first tokens, "
        "64 at a time; set on the head",
    )
    prompt_lookup: int = Field(
        16,
        ge=0,
        le=64,
        description="rows of a step up to which next tokens are guessed from prompt and output; "
        "0: never; set on the head",
    )
    chat_template: Path | None = Field(
        None,
        description="file of a Jinja chat template, the same on all stages; "
        "default: the checkpoint's",
    )
    reply_family: str | None = Field(
        None,
        description="family of models whose reasoning and calls this one writes, such as hermes; "
        "the same on all stages; default: by the chat template",
    )
    adapters_dir: Path | None = Field(
        None,
        description="folder of LoRA adapters in PEFT's format, one subfolder each; "
        "the same files on all stages",
    )
    adapters: int = Field(
        16,
        ge=1,
        le=4096,
        description="adapters in memory, and of running jobs; the same on all stages",
    )
    lanes: int | None = Field(
        None,
        ge=1,
        le=MAX_LANES,
        description="steps in flight, set on the head; default: one for each stage, "
        "up to 16 on slow links",
    )
    lock_dir: Path = Field(
        default_factory=lambda: user_folder() / "locks",
        description="device locks, shared by all containers of a host, one user; "
        "default: `locks` in the user's folder",
    )
    run_dir: Path = Field(
        default_factory=lambda: user_folder() / "run",
        description="sockets of ipc hops; default: `run` in the user's folder",
    )
    cache_dir: Path = Field(
        Path.home() / ".cache" / "shardline",
        description="checksums of weights, profiles of devices, converted weights; "
        "default: `~/.cache/shardline`",
    )
    hop_transport: Literal["ipc", "tcp"] = Field(
        "ipc", description="transport of hops: ipc on one host, tcp between hosts"
    )
    hop_activations: Literal["same", "int8"] = Field(
        "same",
        description="what a head's pipeline sends between machines: same, "
        "or int8: half of bfloat16, and exact=false",
    )
    hop_host: str = Field(
        default_factory=socket.gethostname,
        description="name or address under which other stages reach this one; "
        "default: the host's name",
    )
    hop_bind: str = Field(
        "0.0.0.0",  # noqa: S104 (hosts of a stack)
        description="address on which this stage listens for other stages",
    )
    hop_ports: str | None = Field(
        None,
        description="ports that a firewall allows, such as 7600-7631: two for a stage, "
        "three for a fleet's worker, one more while forming; default: any free one",
    )
    hop_secret_key: SecretStr | None = Field(
        None,
        description="CURVE key of hops over tcp, 64 hexadecimal digits, the same on all stages; "
        "default: required over tcp",
    )
    hop_insecure: bool = Field(
        False, description="hops over tcp without key and encryption: only in a closed network"
    )

    @property
    def is_planned(self) -> bool:
        """Whether the layers come from the plan of the fleet."""
        return self.layers == PLANNED

    @property
    def asks_peers(self) -> bool:
        """Whether some model comes from another worker."""
        return any(each.model.startswith(PEER) for each in self.every_model)

    def streams_on(self, *, cores: bool) -> bool:
        """Returns whether it streams all layers that its memory does not hold, so that a plan may
        count on it. Graphs of an accelerator hold none."""
        return self.streamed_layers == "auto" and (cores or not self.cuda_graphs)

    @property
    def streaming_folder(self) -> Path:
        """Returns where the weights of streamed layers lie."""
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
        """These settings for each model that the worker may serve, this one first. Raises
        Invalid."""
        found = {self.name: self}
        for part in filter(None, (self.further_models or "").split(",")):
            name, _, model = part.strip().rpartition("=")
            own = ("model_revision", "chat_template", "reply_family")
            update = {"model": model, "model_name": name or None, **dict.fromkeys(own)}
            other = self.model_copy(update=update)
            if other.name in found:
                raise Invalid(
                    "SHARDLINE_FURTHER_MODELS", f"{other.name} is named twice", "Write NAME=FOLDER"
                )
            found[other.name] = other
        return list(found.values())

    @property
    def name(self) -> str:
        """The model's name in requests and queues."""
        path = Path(self.model.removeprefix(PEER))
        return self.model_name or (stem_of(path) if is_gguf(path) else path.name)
