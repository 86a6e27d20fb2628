"""The standalone stack's settings from the environment. Knows no process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from shardline_gguf import is_gguf, stem_of
from shardline_server.settings_profile import ProfiledSettings

REPOSITORY = Path(__file__).resolve().parents[2]
PLACEMENT = frozenset({"devices", "replicas", "stages", "split", "workers", "stage_cores", "tp"})
CLERK = Path(__file__).resolve().parent / "demo" / "clerk" / "model"


def _stages(settings: dict[str, Any]) -> int:
    """One for each device; else the cores are two shares, or one that ranks divide."""
    return len((settings["devices"] or "").split()) // settings["replicas"] or (
        2 if settings["tp"] == 1 else 1
    )


class StandaloneSettings(ProfiledSettings):
    """Settings of one stack on one machine."""

    model: str = Field(
        str(CLERK),
        description="folder or hub id of a causal LM in safetensors, or a GGUF file; "
        "default: the demo model clerk",
    )
    model_revision: str | None = Field(
        None,
        description="commit, tag or branch of a hub id; only a full commit is fixed; "
        "default: the hub's main branch",
    )
    model_name: str | None = Field(
        None,
        description="name that requests use; default: the folder's or file's name or the hub id",
    )
    devices: str | None = Field(
        None,
        description="devices of all stages, or of all workers, with spaces: "
        "'cuda:0 cuda:1 cpu:0-7'; default: equal shares of the cores",
    )
    replicas: int = Field(1, ge=1, le=64, description="pipelines on the same queue")
    tp: int = Field(
        1,
        ge=1,
        le=64,
        description="ranks of a stage on cores (tensor parallel): "
        "processes that divide its cores and layers",
    )
    stages: int = Field(
        default_factory=_stages,
        ge=1,
        le=256,
        description="stages of a pipeline; default: one for each device, else 2, "
        "or 1 with `SHARDLINE_TP`; planned if no placement is set",
    )
    split: str | None = Field(
        None,
        description="layers of all stages, such as 0-5,6-7, or even; "
        "default: equal shares; `make up`: planned",
    )
    workers: int | None = Field(
        None,
        ge=1,
        le=256,
        description="number of workers of a fleet, whose plan a relay makes; "
        "stages and split are not used then",
    )
    stage_cores: int | None = Field(
        None, ge=1, description="cores of each stage; default: an equal share"
    )
    stage_preload: str | None = Field(
        None,
        description="LD_PRELOAD of stages, empty for none; default: mimalloc, "
        "else tcmalloc, where installed",
    )
    dtype: Literal["float32", "bfloat16", "float16", "int8", "int4"] = Field(
        "float32",
        description="of weights, activations and KV: float32, bfloat16, float16 (GPU), "
        "int8 or int4 (CPU: weights, the rest bfloat16)",
    )
    http_port: int = Field(
        8000, ge=0, le=65535, description="the gateway's port; 0 takes a free one"
    )
    flower_port: int = Field(5555, ge=0, le=65535, description="Flower's port; 0 takes a free one")
    home: Path = Field(
        Path(".local"),
        description="runtime folder, one for each stack: logs, server data, sockets, up.json",
    )
    start_s: float = Field(
        900, gt=0, description="time for all stages to load and answer a first prompt"
    )

    @property
    def is_placed(self) -> bool:
        """Returns whether anything sets how many stages there are, of how many pipelines, or what
        they compute on."""
        return not PLACEMENT.isdisjoint(self.model_fields_set)

    @property
    def num_processes(self) -> int:
        """The stages of all pipelines, or of the fleet."""
        return self.workers or self.stages * self.replicas

    @property
    def folder(self) -> Path | None:
        """The model's folder or GGUF file, or None for a hub id."""
        path = Path(self.model).expanduser()
        return path.resolve() if path.is_dir() or is_gguf(path) else None

    @property
    def name(self) -> str:
        """The model's name in requests."""
        if self.model_name is not None:
            return self.model_name
        if self.folder is None:
            return self.model
        if is_gguf(self.folder):
            return stem_of(self.folder)
        return "clerk" if self.folder == CLERK else self.folder.name
