"""Layers → stages and stages → cores, for one machine. Knows no process; reads only the model's
config."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from services.standalone.settings import StandaloneSettings
from shardline.base.errors import Invalid
from shardline.contract.fleet.joined_layers import JoinedLayers, joined_layers
from shardline.contract.fleet.split import split_of
from shardline_costs import Plan
from shardline_gguf import read_config
from shardline_server.host.cores import PREFIX, parse_cores, show_cores

KIND = re.compile(r"(?!mps)[a-z]+")
"""A device of which any free one will do."""
GPU_FILES = ("nvidia[0-9]*", "kfd")
"""Of NVIDIA's and AMD's drivers in /dev."""
MOST_LOST = 0.2
"""Of a plan's tokens/s, so that a request alone has all cores."""
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlacement:
    """One stage: its place in one replica, its layers, its cores."""

    replica: int
    place: int
    layers: range | None
    """None: a relay's plan decides."""
    device: str
    """Its SHARDLINE_DEVICE."""
    shared: bool
    """Whether another stage, of this stack or another one, works on the device or on some of its
    cores too."""

    @property
    def name(self) -> str:
        """`stage-0`, and in further replicas `stage-0.1`; `worker-0` if a plan gives it its
        stage."""
        if self.layers is None:
            return f"worker-{self.place}"
        return f"stage-{self.place}" + (f".{self.replica}" if self.replica else "")

    @property
    def layers_text(self) -> str:
        """Returns them as SHARDLINE_LAYERS has them: both ends included."""
        if self.layers is None:
            return "planned"
        return f"{self.layers.start}-{self.layers.stop - 1}"

    @property
    def cores(self) -> tuple[int, ...]:
        """Those that its device names."""
        return parse_cores(self.device) if self.device.startswith(PREFIX) else ()


def places(
    settings: StandaloneSettings,
    num_layers: int,
    cores: list[int],
    taken: frozenset[int] = frozenset(),
    joined: JoinedLayers | None = None,
) -> list[StagePlacement]:
    """Every stage of every replica; cores `taken` by others come last. Raises Invalid for an
    impossible split, or one that cuts `joined` layers apart.

    Where no setting places them, there are no more stages than cores or layers.
    """
    if not settings.is_placed:
        most = min(settings.stages, num_layers, len(cores))
        settings = settings.model_copy(update={"stages": most})
    split = _split(settings, num_layers, joined)
    if settings.devices is None:
        groups = core_groups(settings.num_processes, settings.stage_cores, cores, taken)
        devices = [PREFIX + show_cores(group) for group in groups]
    else:
        devices = _named_devices(settings.devices.split(), settings.num_processes)
    stages = [
        StagePlacement(
            replica=index // len(split),
            place=index % len(split),
            layers=split[index % len(split)],
            device=device,
            shared=False,
        )
        for index, device in enumerate(devices)
    ]
    num_users = Counter(part for stage in stages for part in stage.cores or [stage.device])
    return [replace(stage, shared=_is_shared(stage, num_users, taken)) for stage in stages]


def _named_devices(names: list[str], num: int) -> list[str]:
    if len(names) != num:
        problem = f"it names {len(names)} devices for {num} stages"
        raise Invalid(
            "SHARDLINE_DEVICES",
            problem,
            "Name one for each stage of each replica, with spaces between them",
        )
    return names


def _is_shared(
    stage: StagePlacement, num_users: Mapping[str | int, int], taken: frozenset[int]
) -> bool:
    if KIND.fullmatch(stage.device):
        return False  # each takes one that is free
    return any(num_users[part] > 1 or part in taken for part in stage.cores or [stage.device])


def _split(
    settings: StandaloneSettings, num_layers: int, joined: JoinedLayers | None
) -> Sequence[range | None]:
    """The layers of each stage; None for those that wait for a plan."""
    if settings.workers is not None:
        return [None] * settings.workers
    split = split_of(settings.split, num_layers, settings.stages, joined)
    if len(split) != settings.stages:
        raise Invalid(
            "SHARDLINE_SPLIT",
            f"it has {len(split)} parts for {settings.stages} stages",
            "Make them agree",
        )
    return split


def is_planned(
    settings: StandaloneSettings, stages: Sequence[StagePlacement], num_layers: int
) -> bool:
    """Returns whether there is something to choose, no setting has chosen, and each stage has a
    separate device."""
    devices = {place.device for place in stages if place.replica == 0}
    return (
        settings.workers is None
        and not settings.split
        and 1 < settings.stages < num_layers
        and len(devices) == settings.stages
    )


def replaced(
    stages: Sequence[StagePlacement], plan: Plan, measured: Sequence[str]
) -> list[StagePlacement]:
    """The stages of a plan, which was made for the `measured` devices, those of the first replica.
    Further replicas follow it on their own devices; a device that the plan leaves out has no
    stage."""
    by_device = {device: place for place, device in enumerate(measured)}
    replica = count()
    placed: list[StagePlacement] = []
    for first in range(0, len(stages), len(measured)):
        own = stages[first : first + len(measured)]
        for pipeline, number in (
            (each, number) for each in plan.pipelines for number in range(each.replicas)
        ):
            of_pipeline = next(replica)
            for place, stage in enumerate(pipeline.stages):
                on = own[by_device[stage.devices[number].device]]
                layers = range(stage.first, stage.stop)
                placed.append(replace(on, replica=of_pipeline, place=place, layers=layers))
    return placed


def on_all_cores(stages: Sequence[StagePlacement]) -> StagePlacement:
    """One stage with the whole model on the cores of these, which have equal shares of them."""
    cores = sorted({core for stage in stages for core in stage.cores})
    return replace(
        stages[0],
        layers=range(sum(len(stage.layers or ()) for stage in stages)),
        device=PREFIX + show_cores(cores),
        shared=any(stage.shared for stage in stages),
    )


def is_preferred(whole: Plan, shares: Plan) -> bool:
    """Whether a stage on all cores pays beside the best plan for shares of them: a request alone
    ends sooner there, for which batches may lose a little."""
    allowed = MOST_LOST if whole.request_s < shares.request_s else 0.0
    return whole.tokens_per_s >= (1.0 - allowed) * shares.tokens_per_s


def num_pipelines(stages: Sequence[StagePlacement]) -> int:
    """How many these stages form; of a fleet one, whatever its plan will be."""
    return len({stage.replica for stage in stages})


def is_gpu_unused(settings: StandaloneSettings, devices: Path = Path("/dev")) -> bool:
    """Whether this machine seems to have a GPU while every stage gets cores."""
    return settings.devices is None and any(any(devices.glob(pattern)) for pattern in GPU_FILES)


def core_groups(
    num: int, size: int | None, cores: list[int], taken: frozenset[int]
) -> list[tuple[int, ...]]:
    """`num` groups of `size` cores (default: an equal share), free cores first. With too few,
    groups overlap."""
    size = size or max(1, len(cores) // num)
    if size > len(cores):
        raise Invalid(
            "SHARDLINE_STAGE_CORES",
            f"{size} is more than the {len(cores)} cores here",
            "Ask for fewer",
        )
    ordered = sorted(cores, key=lambda core: (core in taken, core))
    return [
        tuple(sorted(ordered[(index * size + offset) % len(ordered)] for offset in range(size)))
        for index in range(num)
    ]


def count_layers(settings: StandaloneSettings) -> int:
    """Returns the layer count that the model's config gives. Raises Invalid, naming where a model
    must be."""
    config = _config(model_path(settings))
    for scope in (config, config.get("text_config") or {}):
        for name in LAYER_COUNTS:
            if isinstance(scope.get(name), int):
                return int(scope[name])
    raise Invalid(
        "SHARDLINE_MODEL",
        f"config.json of {settings.model} counts no layers",
        "Use a causal language model",
    )


def layers_together(settings: StandaloneSettings) -> JoinedLayers | None:
    """Returns the layers that one stage must hold together, by the model's config."""
    return joined_layers(_config(model_path(settings)))


def _config(model: Path) -> dict[str, Any]:
    try:
        return read_config(model)
    except (OSError, ValueError) as error:
        raise Invalid(
            "SHARDLINE_MODEL",
            f"{model} has no config.json that can be read: {error}",
            "Give a transformers model folder, or a GGUF file",
        ) from error


def model_path(settings: StandaloneSettings) -> Path:
    """The model's folder or GGUF file; of a hub id a folder with its config.json, fetched if need
    be. Raises Invalid, naming where a model must be."""
    if settings.folder is not None:
        return settings.folder
    try:
        return Path(
            huggingface_hub.hf_hub_download(
                settings.model, "config.json", revision=settings.model_revision
            )
        ).parent
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        problem = f"{settings.model!r} is neither a folder here nor a model that the hub gives us"
        raise Invalid(
            "SHARDLINE_MODEL", problem, "Check the path or the id, and the network"
        ) from error
