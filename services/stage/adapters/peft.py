"""Adapters on disk, in PEFT's format: a folder with a config and low-rank weights. What is in one,
what is refused.

Every stage checks an adapter against the whole model, so all of them refuse the same ones. Knows no
torch and loads nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Never

from services.stage.model.shard import LinearSize
from services.stage.model.weights import MALFORMED, cached_sha256, check_file, stamp_of
from shardline.base.errors import Invalid
from shardline.contract.job import ADAPTER_NAME

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
"""PEFT's names: its state_dict has the adapter's name too, other libraries leave out the prefix."""
DOWN = "A"
UP = "B"
"""What the name of a layer's tensor says of its place in the product."""
SETTING = "SHARDLINE_ADAPTERS_DIR"
ALIKE = f"Give all stages the same files in {SETTING}"
FIELD = "model"
"""Of a request: `model:adapter`."""

MAX_RANK = 512
"""Beyond it a layer is nearly as large as those of small models."""
DTYPES = frozenset({"F32", "F16", "BF16"})
COUNTED = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "init_lora_weights",
        "bias",
    }
)
"""Fields of the config that are read here."""
WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "eva_config",
        "base_model_name_or_path",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "target_modules",
        "task_type",
    }
)
"""Fields that change nothing in what the tensors of a trained adapter mean, or that the tensors'
names show too."""
PLAIN_STARTS: Final = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that left the base's weights as they were."""
PLAIN_NAME = re.compile(r"[A-Za-z0-9_.]+")
NAME = re.compile(ADAPTER_NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """What an adapter adds to one linear layer: scale · up(down(x))."""

    rank: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter that fits the model."""

    name: str
    weights: Path
    fingerprint: str
    """sha256 of both files."""
    layers: Mapping[str, LowRank]
    """By the names of the model's linear layers."""


Stamps = tuple[tuple[int, int, int], ...]


class AdapterFolder:
    """The adapters of one model, each in a subfolder of its name. May be used from any thread:
    files are the state."""

    def __init__(
        self, folder: Path | None, sizes: Mapping[str, LinearSize], cache_folder: Path
    ) -> None:
        """Takes the sizes of the linear layers in all layers of the model. Without a folder there
        are no adapters."""
        self._folder = folder
        self._sizes = sizes
        self._cache_folder = cache_folder
        self._known: dict[str, tuple[Stamps, Adapter]] = {}

    def names(self) -> list[str]:
        """Returns the names of subfolders with a config, sorted. Raises OSError if the folder
        cannot be read."""
        return (
            []
            if self._folder is None
            else sorted(path.parent.name for path in self._folder.glob(f"*/{CONFIG}"))
        )

    def known(self) -> dict[str, str]:
        """Returns the fingerprints of the adapters that were last found to fit, by name."""
        return {name: adapter.fingerprint for name, (_, adapter) in self._known.copy().items()}

    def get(self, name: str) -> Adapter:
        """Returns the adapter as its files are now; reads them if they have changed.

        Raises Invalid, with the reason, if there is none or it does not fit the model.
        """
        if self._folder is None:
            refuse(name, f"{SETTING} is not set", ALIKE)
        if NAME.fullmatch(name) is None:
            refuse(name, "a name has letters, digits, _, . and - only", "Rename its folder")
        folder = self._folder / name
        try:
            stamps = tuple(stamp_of(folder / file) for file in (CONFIG, WEIGHTS))
            known = self._known.get(name)
            if known is None or known[0] != stamps:
                known = self._known[name] = (
                    stamps,
                    read_adapter(folder, self._sizes, self._cache_folder),
                )
        except OSError as error:
            self._known.pop(name, None)
            refuse(
                name, f"it needs {CONFIG} and {WEIGHTS}: {error.strerror or error}", ALIKE, error
            )
        return known[1]


def read_adapter(folder: Path, sizes: Mapping[str, LinearSize], cache_folder: Path) -> Adapter:
    """Reads an adapter's config and the header of its weights. Raises Invalid, naming what does not
    fit; OSError."""
    name = folder.name
    text = (folder / CONFIG).read_bytes()
    try:
        config = json.loads(text)
        scale = _scales(name, config)
        tensors = check_file(folder / WEIGHTS).tensors
        layers = _layers(name, tensors, sizes, scale)
    except Invalid as error:
        if error.field == FIELD:
            raise
        refuse(name, error.problem, "Copy the adapter again", error)
    except MALFORMED as error:
        refuse(name, f"{CONFIG} or {WEIGHTS} is broken: {error!r}", "Copy the adapter again", error)
    lines = hashlib.sha256(text).hexdigest() + cached_sha256(folder / WEIGHTS, cache_folder)
    fingerprint = hashlib.sha256(lines.encode()).hexdigest()
    return Adapter(name=name, weights=folder / WEIGHTS, fingerprint=fingerprint, layers=layers)


def tensor_names(names: Iterable[str]) -> dict[tuple[str, str], str]:
    """Returns the names of low-rank weights, by the layer in the model and DOWN or UP."""
    found = ((name, TENSOR.fullmatch(name)) for name in names)
    return {(match[1], match[2]): name for name, match in found if match is not None}


def refuse(name: str, problem: str, remedy: str, cause: Exception | None = None) -> Never:
    """Raises Invalid for an adapter that cannot serve here."""
    raise Invalid(FIELD, f"adapter {name!r}: {problem}", remedy) from cause


def _scales(name: str, config: Mapping[str, Any]) -> Callable[[str, int], float]:
    """Checks the config; returns what a layer of some rank is scaled by. Raises Invalid."""
    if config.get("peft_type") != "LORA":
        refuse(name, f"peft_type is {config.get('peft_type')!r}", "Use an adapter of type LORA")
    if config.get("bias") not in (None, "none"):
        refuse(
            name,
            f"bias is {config['bias']!r}: it trains the base's biases",
            "Train it with bias='none'",
        )
    if config.get("init_lora_weights") not in PLAIN_STARTS:
        what = (
            f"init_lora_weights is {config['init_lora_weights']!r}, "
            "which changes the base's weights"
        )
        refuse(name, what, "Save it with path_initial_model_for_weight_conversion")
    for field in sorted(config.keys() - COUNTED - WITHOUT_EFFECT):
        if config[field]:
            refuse(name, f"{field} is set, which is not supported", f"Train it without {field}")
    ranks, alphas = (_pattern(name, config, field) for field in ("rank_pattern", "alpha_pattern"))
    is_rooted = bool(config.get("use_rslora"))

    def scale(layer: str, rank: int) -> float:
        meant = int(_matched(ranks, layer, config["r"]))
        alpha = float(_matched(alphas, layer, config["lora_alpha"]))
        if meant != rank:
            refuse(
                name,
                f"{layer} has rank {rank}, its config says {meant}",
                "Save it again with save_pretrained",
            )
        return alpha / (math.sqrt(rank) if is_rooted else rank)

    return scale


def _pattern(name: str, config: Mapping[str, Any], field: str) -> dict[str, Any]:
    pattern = dict(config.get(field) or {})
    for key in pattern:
        if PLAIN_NAME.fullmatch(key) is None:
            refuse(name, f"{field} has the expression {key!r}", "Name its layers by plain names")
    return pattern


def _matched(pattern: Mapping[str, Any], layer: str, default: Any) -> Any:
    """The value of the first name that is the layer's or the end of it, as PEFT looks it up."""
    return next(
        (value for key, value in pattern.items() if f".{layer}".endswith(f".{key}")), default
    )


def _layers(
    name: str,
    tensors: Mapping[str, Any],
    sizes: Mapping[str, LinearSize],
    scale: Callable[[str, int], float],
) -> dict[str, LowRank]:
    """The layers that both tensors are there for, and nothing else. Raises Invalid."""
    layers: dict[str, LowRank] = {}
    names = tensor_names(tensors)
    for key in sorted(tensors.keys() - names.values()):
        remedy = "Train it on linear layers alone, without embeddings"
        if ".lora_A." in key or ".lora_B." in key:
            remedy = "Save this adapter alone, with PEFT's save_pretrained"
        refuse(name, f"the tensor {key} is not supported", remedy)
    for (layer, _), key in names.items():
        tensor = tensors[key]
        if (size := sizes.get(layer)) is None:
            refuse(
                name,
                f"the model has no linear layer {layer} within its layers",
                "Use an adapter of this model",
            )
        down, up = (tensors.get(names.get((layer, end), "")) for end in (DOWN, UP))
        if down is None or up is None:
            end = DOWN if down is None else UP
            refuse(name, f"{layer} lacks lora_{end}.weight", "Copy the adapter again")
        rank = (down["shape"] or [0])[0]
        expected = [[rank, size.num_inputs], [size.num_outputs, rank]]
        if [down["shape"], up["shape"]] != expected:
            found = (
                f"{layer} has the shapes {down['shape']} and {up['shape']}, "
                f"this model needs {expected}"
            )
            refuse(name, found, "Use an adapter of this model")
        if not 1 <= rank <= MAX_RANK or tensor["dtype"] not in DTYPES:
            what = f"{layer} has rank {rank} of {tensor['dtype']}"
            refuse(name, what, f"Use a rank of 1 to {MAX_RANK} in float32, float16 or bfloat16")
        if layer not in layers:
            layers[layer] = LowRank(rank=rank, scale=scale(layer, rank))
    if not layers:
        refuse(name, "it has no tensors", "Copy the adapter again")
    return layers
