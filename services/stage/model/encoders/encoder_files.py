"""How a checkpoint turns hidden states into vectors or scores: sentence-transformers' files, or the
head for scores that its config names. Reads no weights, only headers of theirs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.stage.model.encoders.dense_layer import DenseLayer, read_dense
from services.stage.model.encoders.encoder_class import is_masked_lm, scores_pairs
from services.stage.model.refusal import refuse
from shardline.contract.encoders.encoder import Encoder, EncoderTask
from shardline.contract.job import MAX_DIMENSIONS

MODULES = "modules.json"
MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""In the order in which sentence-transformers puts the vectors of several side by side."""
ACTIVATIONS = {"Sigmoid": True, "Identity": False}
"""Whether a score is a share of 1."""
POSITIONS = "position_embedding_type"
ROTARY = ("rope", "rotary")
MAX_DENSE = 8
"""Modules between pooling and normalization."""
MAX_TOKENS = 8192
"""A text takes its room in one step: longer ones are refused, whatever the model could read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFiles:
    """What follows a model's layers, and how long its texts may be."""

    encoder: Encoder
    """What doors need to know."""
    modes: tuple[str, ...] = ()
    """How a text's hidden states become one vector."""
    dense: tuple[DenseLayer, ...] = ()
    """What the vector then goes through."""
    normalizes: bool = False
    """The vector has length 1."""
    is_share: bool = False
    """A score is between 0 and 1."""
    max_tokens: int = MAX_TOKENS

    @property
    def num_bytes(self) -> int:
        """Returns what the weights behind the pooling take in memory."""
        return sum(each.num_bytes for each in self.dense)


def read_encoder(path: Path, config: Any) -> EncoderFiles | None:
    """Returns how a checkpoint pools; None for one that generates text. Raises Invalid for one that
    pools as no stage can."""
    _check_positions(config)
    if scores_pairs(config):
        return _score(path, config)
    modules = _read(path / MODULES)
    if modules is None:
        is_plain = is_masked_lm(config) and _is_base(config)
        return _embed(path, config, ("mean",)) if is_plain else None
    kinds = _kinds(path / MODULES, modules)
    num_dense = kinds.count("Dense")
    normalizes = kinds[-1:] == ["Normalize"]
    order = ["Transformer", "Pooling", *["Dense"] * num_dense, *["Normalize"] * normalizes]
    if kinds != order or num_dense > MAX_DENSE:
        refuse(
            f"{path / MODULES} has the modules {', '.join(kinds) or 'none'}; Transformer, Pooling, "
            f"up to {MAX_DENSE} of Dense, and Normalize, in this order, can be served"
        )
    folder = str(modules[1].get("path") or "1_Pooling")
    modes = _modes(path / folder, _object(path / folder / "config.json"))
    folders = [_subfolder(path, each) for each in modules[2 : 2 + num_dense]]
    dense = _dense(folders, config.hidden_size * len(modes))
    return _embed(path, config, modes, dense, normalizes=normalizes)


def _check_positions(config: Any) -> None:
    """Raises Invalid for layers that only look like those of a family: transformers would count
    positions as the family does."""
    kind = getattr(config, POSITIONS, None)
    if kind in (None, "absolute") or hasattr(type(config), POSITIONS) or not is_masked_lm(config):
        return
    if kind in ROTARY and getattr(config, "rope_parameters", None):
        return
    refuse(
        f"{config.model_type!r} of transformers has no {kind} positions; "
        "a checkpoint's own code is never run",
        "Choose a model that transformers has built in, such as jina_embeddings_v3 or modernbert",
    )


def _subfolder(path: Path, module: Any) -> Path:
    name = module.get("path")
    if not isinstance(name, str) or not name or Path(name).name != name:
        refuse(f"{path / MODULES} has a module in {name!r}, no folder next to it")
    return path / name


def _dense(folders: list[Path], num_inputs: int) -> tuple[DenseLayer, ...]:
    found: list[DenseLayer] = []
    for folder in folders:
        found.append(read_dense(folder, _object(folder / "config.json"), num_inputs))
        num_inputs = found[-1].num_outputs
    return tuple(found)


def _is_base(config: Any) -> bool:
    """Whether the checkpoint is one of layers alone, or with a head that fills gaps."""
    (name, *_) = config.architectures or ("",)
    return name.endswith(("Model", "ForMaskedLM", "ForPreTraining"))


def _kinds(file: Path, modules: Any) -> list[str]:
    try:
        return [str(each["type"]).rpartition(".")[2] for each in modules]
    except (KeyError, TypeError) as error:
        refuse(f"{file} is malformed: {error!r}", "Copy the model again", error)


def _modes(folder: Path, pooling: dict[str, Any]) -> tuple[str, ...]:
    named = pooling.get("pooling_mode")
    found = [named] if isinstance(named, str) else named or []
    found += [mode for name, mode in MODES.items() if pooling.get(name) and mode not in found]
    unknown = [mode for mode in found if mode not in MODES.values()]
    if unknown or not found:
        refuse(f"{folder} pools by {unknown or 'nothing'}, which no stage knows")
    if pooling.get("include_prompt") is False:
        refuse(f"{folder} leaves a prompt's tokens out of the vector")
    return tuple(found)


def _embed(
    path: Path,
    config: Any,
    modes: tuple[str, ...],
    dense: tuple[DenseLayer, ...] = (),
    *,
    normalizes: bool = False,
) -> EncoderFiles:
    sentences = _object(path / "config_sentence_transformers.json")
    prompts = {
        str(name): str(text) for name, text in (sentences.get("prompts") or {}).items() if text
    }
    default = sentences.get("default_prompt_name")
    own = _sentence_config(path)
    shorter = _shorter(path, config)
    num_dimensions = dense[-1].num_outputs if dense else config.hidden_size * len(modes)
    if num_dimensions > MAX_DIMENSIONS:
        refuse(f"{path} has vectors of {num_dimensions:,} numbers, over {MAX_DIMENSIONS:,}")
    encoder = Encoder(
        task=EncoderTask.EMBED,
        num_dimensions=num_dimensions,
        shorter=tuple(each for each in shorter if each <= num_dimensions),
        any_shorter=bool(getattr(config, "is_matryoshka", False)) and not shorter,
        prompts=prompts,
        default_prompt=default if default in prompts else None,
        lowercases=own.get("do_lower_case") is True,
    )
    return EncoderFiles(
        encoder=encoder,
        modes=modes,
        dense=dense,
        normalizes=normalizes,
        max_tokens=_longest(own),
    )


def _shorter(path: Path, config: Any) -> tuple[int, ...]:
    """Returns the sizes that a vector may be cut to."""
    found = getattr(config, "matryoshka_dimensions", None) or []
    if not isinstance(found, list | tuple) or any(
        type(each) is not int or each < 1 for each in found
    ):
        problem = f"{path / 'config.json'}: matryoshka_dimensions {found!r} is no list of sizes"
        refuse(problem[:200], "Copy the model again")
    return tuple(found)


def _score(path: Path, config: Any) -> EncoderFiles:
    kind = config.architectures[0]
    if config.num_labels != 1:
        refuse(f"{kind} has {config.num_labels} labels; a cross-encoder has one")
    named = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
    named = named or getattr(config, "sbert_ce_default_activation_function", None) or "Sigmoid"
    activation = str(named).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        refuse(f"{path} turns scores by {named}; Sigmoid and Identity can be served")
    has_types = getattr(config, "type_vocab_size", 1) > 1
    encoder = Encoder(
        task=EncoderTask.SCORE,
        num_dimensions=1,
        separator=_separator(path) if has_types else None,
    )
    longest = _longest(_sentence_config(path))
    return EncoderFiles(encoder=encoder, is_share=ACTIVATIONS[activation], max_tokens=longest)


def _separator(path: Path) -> int:
    """Returns the id of the token between two texts."""
    names = _object(path / "special_tokens_map.json") | _object(path / "tokenizer_config.json")
    token = names.get("sep_token")
    text = token.get("content") if isinstance(token, dict) else token
    tokenizer = _object(path / "tokenizer.json")
    added = {each["content"]: each["id"] for each in tokenizer.get("added_tokens") or ()}
    found = added.get(text, (tokenizer.get("model") or {}).get("vocab", {}).get(text))
    if not isinstance(found, int):
        refuse(f"{path} names no token between two texts (sep_token)", "Copy the model again")
    return found


def _sentence_config(path: Path) -> dict[str, Any]:
    """Returns sentence-transformers' settings of the layers, which older versions name by the
    family."""
    for file in sorted(path.glob("sentence_*_config.json")):
        return _object(file)
    return {}


def _longest(own: dict[str, Any]) -> int:
    stated = own.get("max_seq_length")
    return min(stated, MAX_TOKENS) if isinstance(stated, int) and stated > 0 else MAX_TOKENS


def _object(file: Path) -> dict[str, Any]:
    found = _read(file)
    if found is not None and not isinstance(found, dict):
        refuse(f"{file} is no JSON object", "Copy the model again")
    return found or {}


def _read(file: Path) -> Any:
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        refuse(f"{file} cannot be read: {error}", "Copy the model again", error)
