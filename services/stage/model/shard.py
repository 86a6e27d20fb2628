"""A shard: layers [a, b) of a causal LM or an encoder, loaded by transformers' own loader and
computed by its own modules.

A run-time subclass of the model's class replaces everything outside [a, b) by stubs before weights
are read, so the loader does renames, merges and ties, and reads only what is left. Knows no KV, no
StepPlan and no sampling.

Letters of shapes: T packed rows, H the hidden size, R sampled rows, V the vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as tf
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from services.stage.attention.by_position import count_by_rows
from services.stage.model.cpu_parts import CpuPart, place
from services.stage.model.encoders.distance_bias import (
    WEIGHT,
    biases_by_distance,
    use_distance_bias,
)
from services.stage.model.encoders.encoder_class import (
    first_position,
    is_encoder,
    mark,
    number_attention,
)
from services.stage.model.model_info import EMBEDDINGS, ModelInfo
from services.stage.model.pieces import PassThrough, Pieces, stub_of, stub_of_layer
from services.stage.model.refusal import refuse
from services.stage.model.text_part import language_model, text_class, use_text_alone
from services.stage.model.weights import WeightFile, check_file, weight_files
from services.stage.products.experts import EXPERTS
from services.stage.products.packing import is_linear
from services.stage.products.selected_experts import select_experts
from services.stage.recurrent.mixers import use_mixers
from shardline.base.errors import Invalid

REPORTS = ("missing_keys", "mismatched_keys", "error_msgs")


class LinearSize(NamedTuple):
    """Holds the size of a linear layer."""

    num_inputs: int
    num_outputs: int


def shard_class(info: ModelInfo, layers: range, *, keeps_output: bool = False) -> Any:
    """Returns the model's class with stubs outside `layers`: with `keeps_output`, but for the
    output layer, which the loader then ties to the embedding."""
    base = text_class(info.config)
    first = layers.start == 0
    last = layers.stop == info.num_layers
    watched = None if info.text_config.base_model_pp_plan else Pieces.watched(info.config)

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if is_encoder(info.config):
            mark(config)  # the loader has read it from its file again
        base.__init__(self, config, *args, **kwargs)
        _check_signatures(self)
        use_text_alone(self)
        select_experts(self)
        self.pieces = pieces = watched or Pieces.planned(self)
        decoder = language_model(self)
        stack = decoder.get_submodule(pieces.layers)
        if is_encoder(config):
            number_attention(stack)
            use_distance_bias(decoder, stack, config)
        self.linear_sizes = _linear_sizes(self, stack)
        embedding = self.get_input_embeddings()
        is_tied = bool(self.all_tied_weights_keys)
        if not first:
            for name in pieces.before:
                piece = decoder.get_submodule(name)
                if name.endswith(WEIGHT):
                    continue  # every stage adds it to its layers' scores
                if not (last and is_tied and piece is embedding):
                    decoder.set_submodule(name, stub_of(piece))
        for number in range(info.num_layers):
            if number not in layers:
                # the entry stays: models index their layers by number
                stack[number] = stub_of_layer(stack[number], pieces.num_outputs)
        if not last:
            for name in pieces.after:
                decoder.set_submodule(name, PassThrough())
            if not keeps_output:
                _drop_output(self)

    body = {"__init__": init, "__module__": base.__module__, "config_class": type(info.config)}
    if biases_by_distance(base):
        body["_can_set_attn_implementation"] = classmethod(lambda _: True)
    return type(base.__name__, (base,), body)


def build_skeleton(
    info: ModelInfo,
    layers: range,
    *,
    dtype: torch.dtype,
    attn_implementation: str,
) -> Any:
    """Builds the model that `Shard.load` fills, to be measured before any weight is read: its
    parameters have no memory, and none is shared by tied layers.

    Raises Invalid if the model cannot be sharded.
    """
    _check_layers(info, layers)
    kind = shard_class(info, layers)
    untied: Any = type(kind.__name__, (kind,), {"tie_weights": lambda *_, **__: None})
    with quiet_transformers(), _refusing(info), torch.device("meta"):
        return untied._from_config(  # noqa: SLF001 (as the loader builds it)
            copy.deepcopy(info.config),
            dtype=dtype,
            attn_implementation=attn_implementation,
            experts_implementation=EXPERTS,
        )


def shard_layers(model: Any, layers: range) -> dict[int, nn.Module]:
    """Returns these layers of a model by their numbers."""
    stack = language_model(model).get_submodule(model.pieces.layers)
    return {number: stack[number] for number in layers}


def row_lengths(layers: Iterable[nn.Module]) -> frozenset[int]:
    """Returns the outputs of the linear layers in these layers, and their halves, where two may be
    fused. Convolutions have one row for each channel and are no linear layers."""
    weights = [p for layer in layers for p in layer.parameters() if p.dim() > 1]
    sizes = {int(p.shape[-2]) for p in weights if p.dim() == 2 or p.shape[-2] > 1}
    return frozenset(sizes | {size // 2 for size in sizes if size % 2 == 0})


class Shard:
    """Some layers of a model, ready to compute: `hidden` on any stage, `logits` on the tail."""

    def __init__(
        self,
        model: Any,
        info: ModelInfo,
        layers: range,
        device: torch.device,
        streamed_layers: tuple[int, ...] = (),
    ) -> None:
        self.model = model
        self.info = info
        self.layers = layers
        self.device = device
        self.is_first = layers.start == 0
        self.is_last = layers.stop == info.num_layers
        self.decoder = language_model(model)
        self.dtype: torch.dtype = model.dtype
        self._stack = self.decoder.get_submodule(model.pieces.layers)
        self.layer_modules = shard_layers(model, layers)
        count_by_rows(self.layer_modules.values())
        self.recurrence = use_mixers(self.layer_modules)
        self.widths = row_lengths(self.layer_modules.values())
        """The row lengths of elementwise operations."""
        self.streamed_layers = streamed_layers
        """By number: those with weights that are read in every step."""
        self.output_shares: dict[str, range] = {}
        """The outputs that this rank computes of linear layers that ranks divide, by their names in
        the model."""
        self.linear_sizes: dict[str, LinearSize] = model.linear_sizes
        """Of the linear layers within every layer of the model, other stages' too, by their names
        in it."""
        encoder = info.encoder
        self._first_position = first_position(info.config) if is_encoder(info.config) else 0
        self._separator = None if encoder is None else encoder.encoder.separator
        self._received: Tensor | None = None
        # what the stage before sent replaces all that the model did before its layers
        if not self.is_first:
            self.layer_modules[layers.start].register_forward_pre_hook(
                self._take_received, with_kwargs=True
            )

    @classmethod
    def load(
        cls,
        model: str | Path | ModelInfo,
        layers: range,
        *,
        dtype: torch.dtype,
        attn_implementation: str,
        device: torch.device,
        cpu_parts: frozenset[CpuPart] = frozenset(),
        streamed_layers: tuple[int, ...] = (),
    ) -> Shard:
        """Loads these layers of a model from a folder or hub id, onto `device` but for `cpu_parts`
        and `streamed_layers`, by their numbers.

        Raises Invalid, with the remedy, if the model cannot be sharded or loaded, and Unavailable
        if the hub does not answer.
        """
        info = model if isinstance(model, ModelInfo) else ModelInfo.read(model)
        _check_layers(info, layers)
        files = [check_file(file) for file in weight_files(info.path)]
        is_first_of_several = layers.start == 0 and layers.stop < info.num_layers
        keeps_output = is_first_of_several and _lack_embedding(files)
        with quiet_transformers(), _refusing(info):
            kind = shard_class(info, layers, keeps_output=keeps_output)
            loaded, report = kind.from_pretrained(
                info.path,
                dtype=dtype,
                attn_implementation=attn_implementation,
                experts_implementation=EXPERTS,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                # The report below names them; the loader's own error does not.
                ignore_mismatched_sizes=True,
            )
        for name in REPORTS:
            if report[name]:
                refuse(
                    f"{info.path} has {name} {_some(report[name])}",
                    "Copy the model again, or correct its config",
                )
        if keeps_output:
            _drop_output(loaded)
        shard = cls(loaded.eval(), info, layers, device, streamed_layers)
        with shard.without(streamed_layers):
            place(loaded, device, cpu_parts)
        return shard

    @property
    def output_device(self) -> torch.device:
        """Returns the device on which the output layer computes and logits lie."""
        output = self.model.get_output_embeddings()
        parameter = None if output is None else next(output.parameters(), None)
        return self.device if parameter is None else parameter.device

    def zeros(self, num_rows: int) -> Tensor:
        """Returns zeros as input: ids int64 [T] on the first shard, hidden states [T, H] in `dtype`
        on the others."""
        if self.is_first:
            return torch.zeros(num_rows, dtype=torch.long, device=self.device)
        return torch.zeros(num_rows, self.info.hidden_size, dtype=self.dtype, device=self.device)

    @contextmanager
    def without(self, layers: Iterable[int]) -> Iterator[None]:
        """While entered, the model lacks these layers: those of a shard that holds the first one
        return their input."""
        left_out = list(layers)
        try:
            num_outputs = self.model.pieces.num_outputs
            for number in left_out:
                self._stack[number] = stub_of_layer(self.layer_modules[number], num_outputs)
            yield
        finally:
            for number in left_out:
                self._stack[number] = self.layer_modules[number]

    def hidden(self, x: Tensor, position_ids: Tensor) -> Tensor:
        """Returns the hidden states [T, H] in `dtype` after this shard's layers.

        `x` holds ids int64 [T] on the first shard, hidden states [T, H] in `dtype` on the others;
        `position_ids` is int64 [T].
        """
        states: Tensor = self.decoder(**self._inputs(x, position_ids)).last_hidden_state
        return states[0]

    def logits(self, x: Tensor, position_ids: Tensor, sampled_rows: Tensor) -> Tensor:
        """Returns the logits [R, V] of the sampled rows, with all that the model's own forward does
        after its layers.

        `x` and `position_ids` are those of `hidden`; `sampled_rows`, int64 [R], are indices of
        packed rows. The logits have the dtype that the model's forward gives them, and lie where
        the output layer does.
        """
        logits: Tensor = self.model(
            **self._inputs(x, position_ids), logits_to_keep=sampled_rows
        ).logits
        return logits[0]

    def _inputs(self, x: Tensor, position_ids: Tensor) -> dict[str, Any]:
        self._received = x = x[None]
        if not self.is_first:
            return {"inputs_embeds": x, **self._positions(position_ids)}
        if self._separator is None:
            return {"input_ids": x, **self._positions(position_ids)}
        types = _token_types(x[0], position_ids, self._separator)
        return {"input_ids": x, "token_type_ids": types[None], **self._positions(position_ids)}

    def _positions(self, position_ids: Tensor) -> dict[str, Any]:
        return {"position_ids": position_ids[None] + self._first_position, "use_cache": False}

    def _take_received(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        if args:
            return (self._received, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._received}


def _drop_output(model: Any) -> None:
    if model.get_output_embeddings() is not None:
        model.set_output_embeddings(PassThrough())
    model.all_tied_weights_keys = {}


def _lack_embedding(files: Iterable[WeightFile]) -> bool:
    """Whether the weights may have a tied embedding under the name of the output layer alone."""
    return not any(name.endswith(EMBEDDINGS) for file in files for name in file.tensors)


def _token_types(ids: Tensor, position_ids: Tensor, separator: int) -> Tensor:
    """Returns 1 for the tokens of packed pairs [T] behind a separator of their pair, else 0."""
    is_separator = (ids == separator).long()
    num_before = is_separator.cumsum(0) - is_separator
    begins = torch.arange(len(ids), device=ids.device) - position_ids
    return (num_before > num_before[begins.clamp(min=0)]).long()


def _linear_sizes(model: nn.Module, stack: nn.Module) -> dict[str, LinearSize]:
    """Returns the sizes of linear layers within `stack`, by their names in the model."""
    prefix = next(name for name, module in model.named_modules() if module is stack)
    found = (
        (f"{prefix}.{name}", module) for name, module in stack.named_modules() if is_linear(module)
    )
    return {
        name: LinearSize(
            *(module.weight.shape if isinstance(module, Conv1D) else reversed(module.weight.shape))
        )
        for name, module in found
    }


def _check_layers(info: ModelInfo, layers: range) -> None:
    if not 0 <= layers.start < layers.stop <= info.num_layers or layers.step != 1:
        problem = f"the model has layers 0-{info.num_layers - 1}, not {layers}"
        raise Invalid("SHARDLINE_SPLIT", problem, "Correct it")
    if info.joined is not None:
        info.joined.check([layers], "SHARDLINE_SPLIT")


@contextmanager
def _refusing(info: ModelInfo) -> Iterator[None]:
    """Turns the loader's errors into Invalid."""
    try:
        yield
    except AttributeError as error:
        kind = info.config.model_type
        refuse(
            f"{kind!r} cannot be loaded in parts: {error}", "Let one stage hold all layers", error
        )
    except ImportError as error:
        refuse(f"transformers needs a library to load {info.path}: {error}", cause=error)
    except (SafetensorError, RuntimeError, OSError, ValueError) as error:
        refuse(f"{info.path} cannot be loaded: {error}", "Copy the model again", error)


def _some(names: Any) -> str:
    shown = sorted(str(name) for name in names)
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _check_signatures(model: Any) -> None:
    needs = [(language_model(model), "position_ids"), (model, "logits_to_keep")]
    for part, needed in needs[:1] if is_encoder(model.config) else needs:
        if needed not in inspect.signature(part.forward).parameters:
            refuse(f"{type(part).__name__}.forward takes no {needed}, which packed batches need")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences progress bars, warnings about a miniature, and the report of the other stages'
    weights as unexpected."""
    verbosity = tf.logging.get_verbosity()
    bars = tf.logging.is_progress_bar_enabled()
    tf.logging.set_verbosity_error()
    tf.logging.disable_progress_bar()
    try:
        yield
    finally:
        tf.logging.set_verbosity(verbosity)
        if bars:
            tf.logging.enable_progress_bar()
