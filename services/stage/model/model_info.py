"""Reads a model's sizes and limits from its folder, without its weights, and refuses what cannot be
sharded.

Owns the rules of refusal; knows nothing of devices, KV or how a shard is loaded.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from huggingface_hub import is_offline_mode, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from services.stage.model.config_files import (
    CONFIG,
    eos_ids,
    ignored_rules,
    quantization_of,
    read_config,
)
from services.stage.model.encoders.distance_bias import biases_by_distance
from services.stage.model.encoders.encoder_class import (
    first_position,
    is_encoder,
    mark,
    sees_both_ways,
)
from services.stage.model.encoders.encoder_files import MODULES, EncoderFiles, read_encoder
from services.stage.model.gguf.unpacked_folder import gguf_of, unpack
from services.stage.model.refusal import refuse
from services.stage.model.text_part import is_container, layers_class, model_class, text_config
from services.stage.model.weights import DENSE, MORE_TEMPLATES, ONE_FILE, header_of, weight_files
from shardline.base.errors import Unavailable
from shardline.contract import plain_json
from shardline.contract.fleet.joined_layers import JoinedLayers, joined_layers
from shardline_server.tokenize import chosen_template, model_row

log = structlog.get_logger(__name__)

HUB_FILES = (
    *("*.json", "model*.safetensors", "tokenizer*", "*.jinja", "*.model", "*.txt"),
    *("*_Pooling/config.json", f"{DENSE}/config.json", f"{DENSE}/{ONE_FILE}", MORE_TEMPLATES),
)
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
"""How names of the tensor end that has a row for each token."""

OTHER_TOKENIZERS = ("vocab.json", "tekken.json", "tokenizer.model", "spiece.model", "vocab.txt")
"""Tokenizers that transformers converts."""

CACHE = Path.home() / ".cache" / "shardline"
"""The default of SHARDLINE_CACHE_DIR."""
SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
RECURRENT_TYPES = frozenset({"conv", "linear_attention", "hybrid"})
"""Layers of these types are recognized by their parts, or refused by the trial of the miniature."""
CAUSAL = "ForCausalLM"
ROW_BY_ROW = frozenset({"mlp", "moe"})
"""Types of layers that compute each row alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A causal LM or an encoder that can be sharded: its folder, its config, and what a scheduler
    needs to know of it."""

    path: Path
    """Of a GGUF file: its folder in the cache."""
    revision: str | None
    """The commit that was downloaded from the hub; None for a local folder."""
    config: Any
    num_layers: int
    context_length: int
    vocab_size: int
    hidden_size: int
    eos_ids: tuple[int, ...]
    encoder: EncoderFiles | None = None
    """None: it generates text."""

    @classmethod
    def read(
        cls, model: str | Path, revision: str | None = None, *, cache_folder: Path = CACHE
    ) -> ModelInfo:
        """Reads a model from a local folder, a GGUF file or a hub id.

        Raises Invalid, with the reason, if it cannot be sharded, and Unavailable if the hub does
        not answer.
        """
        path, commit = _find(model, revision, cache_folder)
        config = read_config(path)
        encoder = read_encoder(path, config)
        if encoder is not None:
            mark(config)
        check_can_be_sharded(config)
        text = text_config(config)
        _check_vocabulary(path, text.vocab_size)
        return cls(
            path=path,
            revision=commit,
            config=config,
            num_layers=text.num_hidden_layers,
            context_length=_context_length(text)
            if encoder is None
            else min(_context_length(text) - first_position(config), encoder.max_tokens),
            vocab_size=text.vocab_size,
            hidden_size=text.hidden_size,
            eos_ids=eos_ids(path, config),
            encoder=encoder,
        )

    @property
    def joined(self) -> JoinedLayers | None:
        """Returns the layers that one stage must hold together, if there are some."""
        return joined_layers(self.text_config.to_dict())

    @property
    def text_config(self) -> Any:
        """Returns the config of the layers: `config`, or the one that a multimodal model has inside
        it."""
        return text_config(self.config)

    def row(
        self,
        *,
        name: str,
        fingerprint: str,
        chat_template: Path | None = None,
        reply_family: str | None = None,
    ) -> dict[str, Any]:
        """Returns the row of the table `models`: doors read from it the limits that a head of this
        model keeps. `chat_template` and `reply_family` are settings. Raises Invalid."""
        encoder = None if self.encoder is None else self.encoder.encoder
        ignored = ignored_rules(self.path) if encoder is None else []
        if ignored:
            log.warning(
                "rules of generation_config.json are not applied: "
                "send logit_bias, bad_words, min_tokens or stop with requests that need them",
                model=name,
                fields=ignored,
            )
        row = model_row(
            self.path,
            name=name,
            fingerprint=fingerprint,
            context_length=self.context_length,
            vocab_size=self.vocab_size,
            eos_ids=self.eos_ids,
            revision=self.revision,
        )
        others = [file for file in OTHER_TOKENIZERS if (self.path / file).is_file()]
        if others and not row["tokenizer"]:
            log.warning(
                "without tokenizer.json prompts are token ids only: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes it",
                model=name,
                folder=str(self.path),
                files=others,
            )
        chosen = chosen_template(
            row["chat_template"], path=chat_template, reply_family=reply_family
        )
        return {**row, "chat_template": chosen, "encoder": plain_json.builtins(encoder)}


def model_files(folder: Path) -> list[Path]:
    """All that another host needs of a model's folder. Raises Invalid if a file of weights is
    missing."""
    found = {path for pattern in HUB_FILES for path in folder.glob(pattern) if path.is_file()}
    return sorted(found | set(weight_files(folder)))


def _find(model: str | Path, revision: str | None, cache_folder: Path) -> tuple[Path, str | None]:
    """Returns the folder of a model, and its commit if it comes from the hub."""
    path = Path(model).expanduser()
    file = gguf_of(path)
    if path.is_dir() or file is not None:
        if revision is not None:
            kind = "folder" if file is None else "GGUF file"
            refuse(
                f"{path} is a {kind}, which has no revision {revision!r}",
                "Unset SHARDLINE_MODEL_REVISION",
            )
        return (path.resolve() if file is None else unpack(file, cache_folder)), None
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(model)):
        refuse(
            f"{str(model)!r} is neither a folder nor a hub id",
            "Give a folder with config.json, a GGUF file, or owner/name",
        )
    snapshot = _download(str(model), revision)
    commit = snapshot.name
    if revision != commit:
        log.warning(
            "the model's revision is not fixed: "
            "other hosts and later starts may get other weights. "
            "Set SHARDLINE_MODEL_REVISION to the commit",
            model=str(model),
            revision=revision,
            commit=commit,
        )
    return snapshot, commit


def _download(model: str, revision: str | None) -> Path:
    """Downloads safetensors and text files only into the hub's own cache; returns the folder
    `snapshots/<commit>`."""
    try:
        patterns = list(HUB_FILES)
        # Offline, huggingface_hub 1 asks the network for the files of a commit all the same.
        is_local = is_offline_mode()
        return Path(
            snapshot_download(
                model, revision=revision, allow_patterns=patterns, local_files_only=is_local
            )
        )
    except RevisionNotFoundError as error:
        refuse(
            f"the hub's model {model!r} has no revision {revision!r}",
            "Check SHARDLINE_MODEL_REVISION",
            error,
        )
    except (RepositoryNotFoundError, HFValidationError) as error:
        refuse(
            f"the hub has no model {model!r}", "Check the name, or HF_TOKEN if it is private", error
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise Unavailable(f"cannot fetch {model!r} from the hub: {error}") from error


def check_can_be_sharded(config: Any) -> None:
    """Raises Invalid for a config, or a class of transformers, that tells why its model cannot run
    in stages."""
    kind = config.model_type
    if config.is_encoder_decoder:
        refuse(f"{kind!r} is an encoder-decoder, not a causal LM")
    if model_class(config) is None:
        refuse(f"{kind!r} is not a causal LM")
    _check_class(config)
    text = text_config(config)
    if text is config and is_container(config) and not config.base_model_pp_plan:
        refuse(f"{kind!r} is multimodal in one piece")
    quantization_of(config)
    types = set(getattr(text, "layer_types", None) or ())
    odd = types - ATTENTION_TYPES - RECURRENT_TYPES - ROW_BY_ROW
    if odd:
        refuse(
            f"{kind!r} has layers of type {', '.join(sorted(odd))}",
            "Choose a model of full, sliding or chunked attention, or known recurrent layers",
        )
    is_stateful = model_class(config)._is_stateful  # noqa: SLF001 (transformers has no reader)
    if is_stateful and not types:  # attention alone, as in Granite 4, needs no state
        refuse(
            f"{kind!r} keeps a state that goes from token to token; only keys and values are kept"
        )
    if types and types <= RECURRENT_TYPES - {"hybrid"}:
        refuse(f"{kind!r} has recurrent layers alone, without attention")
    missing = [name for name in SIZES if not _has_size(text, name)]
    if missing:
        refuse(f"{kind!r} has no {missing[0]}: it is not one stack of equal layers")
    below = next((name for name in SIZES if getattr(text, name) < 1), None)
    if below is not None:
        refuse(f"config.json has {below} {getattr(text, below)}", "Write the model's own number")
    layers = layers_class(config)
    is_biased = is_encoder(config) and biases_by_distance(layers)
    if not (is_biased or hasattr(sys.modules[layers.__module__], "ALL_ATTENTION_FUNCTIONS")):
        refuse(f"{kind!r} does not attend through transformers' attention interface")
    looks_ahead = getattr(text, "is_causal", True) is False
    looks_ahead |= bool(getattr(text, "use_bidirectional_attention", None))
    if looks_ahead and not sees_both_ways(config):
        remedy = f"Choose another model, or an encoder with {MODULES}"
        refuse(f"{kind!r} attends to later tokens", remedy)


def _check_class(config: Any) -> None:
    """Raises Invalid for a checkpoint that was saved as another class. Some publishers spell it
    otherwise than transformers: PhiMoEForCausalLM is its PhimoeForCausalLM."""
    name = model_class(config).__name__
    saved = [str(each) for each in config.architectures or ()]
    if not saved or is_encoder(config) or name.lower() in {each.lower() for each in saved}:
        return
    remedy = f"Give a checkpoint with a language-model head, or an encoder with {MODULES}"
    if saved[0].endswith(CAUSAL) and name.endswith(CAUSAL):
        remedy = f"If the weights are this model's, write {name} into architectures in {CONFIG}"
    refuse(f"it was saved as {saved[0]}, not as {name}", remedy)


def _has_size(config: Any, name: str) -> bool:
    try:
        return isinstance(getattr(config, name, None), int)
    except RuntimeError:  # transformers' answer where layers differ in it
        return False


def _check_vocabulary(path: Path, vocab_size: int) -> None:
    """Raises Invalid if a file of weights is missing, or the embedding has other rows than the
    config gives."""
    for file in weight_files(path):
        for name, tensor in header_of(file).items():
            rows = (tensor.get("shape") or [vocab_size])[0]
            if name.endswith(EMBEDDINGS) and rows != vocab_size:
                found = f"vocab_size is {vocab_size} in config.json, and {name} has {rows} rows"
                refuse(
                    found, "Correct the config, or resize the embedding and save the model again"
                )


def _context_length(config: Any) -> int:
    """Returns the context that the checkpoint is made for: YaRN and linear scaling extend its
    positions by their factor, as they do in vLLM.

    Where a rope has other frequencies for longer sequences (`dynamic`, `longrope`), it is the
    length from which it has: within a batch, and within a sequence that grows, there can be only
    one kind.
    """
    length = getattr(config, "max_position_embeddings", None)
    if length is None:
        refuse(f"{config.model_type!r} names no limit of its context (max_position_embeddings)")
    if length < 1:
        problem = f"config.json has max_position_embeddings {length}"
        refuse(problem, "Write the model's own number")
    rope = getattr(config, "rope_parameters", None) or {}
    layered = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    limits = [
        _scaled(int(length), rope),
        *(limit for part in layered if (limit := _limit_of_rope(part))),
    ]
    context = min(limits)
    if context < limits[0]:
        log.warning(
            "the model's context ends where its rope changes: "
            "longrope reaches all of it with long_factor copied over short_factor in config.json",
            context=context,
            positions=limits[0],
        )
    return context


def _scaled(length: int, rope: Mapping[str, Any]) -> int:
    """Returns the positions of a model of one rope. Layers with separate ropes are made for the
    stated length."""
    factor = rope.get("factor")
    if rope.get("rope_type") not in ("yarn", "linear") or not isinstance(factor, int | float):
        return length
    original = rope.get("original_max_position_embeddings") or length
    return max(length, int(original * factor)) if math.isfinite(factor) else length


def _limit_of_rope(rope: Mapping[str, Any]) -> int | None:
    """Returns the length from which a rope has other frequencies; None if it never has."""
    kind = rope.get("rope_type")
    pairs = (("long_factor", "short_factor"), ("long_mscale", "short_mscale"))
    if kind == "longrope" and all(rope.get(long) == rope.get(short) for long, short in pairs):
        return None
    original = rope.get("original_max_position_embeddings")
    return int(original) if kind in ("longrope", "dynamic") and original else None
