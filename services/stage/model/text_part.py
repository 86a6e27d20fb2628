"""The text of a multimodal model: its language model inside the container's own class, without the
towers and projectors of other inputs.

The container's class stays: its loader knows the names that its checkpoints give tensors, its
forward what follows the layers. Knows no shard and no KV.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from services.stage.model.encoders.encoder_class import encoder_class, is_encoder
from services.stage.model.refusal import refuse

META = torch.device("meta")
CONTAINERS: tuple[Any, ...] = (
    tf.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    tf.MODEL_FOR_MULTIMODAL_LM_MAPPING,
    tf.MODEL_FOR_CAUSAL_LM_MAPPING,
)
"""In which transformers names the classes of a container's config."""


class OtherInput(nn.Module):
    """Replaces what reads images, sound or video: it has the numbers of the part that it replaces
    and no weights, and adds nothing to a text."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        for name, value in vars(part).items():
            if type(value) is int:
                setattr(self, name, value)

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """Returns the embeddings that it is given, [...] of a float dtype, unchanged; for ids,
        which are none of a text, a zero, []."""
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        zero = given[0].new_zeros((), dtype=torch.float32)
        return next((x for x in given if x.is_floating_point()), zero)


class TimmTower(tf.PreTrainedModel):
    """Stands for a tower that the library timm would build, which a text does not need. It has a
    weight, as any tower."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(torch.empty(1))


# For the whole process, in which nothing looks at images. `AutoModel.register` of 5.17 leaves
# transformers' own configs as they are.
tf.MODEL_MAPPING._extra_content.update(  # noqa: SLF001 (there is no public way)
    {
        config: type(TimmTower.__name__, (TimmTower,), {"config_class": config})
        for config in (tf.Gemma3nVisionConfig, tf.TimmWrapperConfig)
    }
)


class TextOutput(BaseModelOutputWithPast):
    """A language model's output as its container's forward reads it: of other inputs it has
    nothing."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def text_config(config: Any) -> Any:
    """Returns the config of the language model: the model's own, or the one inside a container's.
    Raises Invalid if a container has several."""
    try:
        return config.get_text_config(decoder=True)
    except ValueError as error:
        refuse(f"{config.model_type!r} has several language models", cause=error)


def is_container(config: Any) -> bool:
    """Returns whether a model of this config has parts for other inputs than text."""
    text = text_config(config)
    others = [getattr(config, name, None) for name in config.sub_configs]
    return text is not config or any(hasattr(other, "num_hidden_layers") for other in others)


def model_class(config: Any) -> Any:
    """Returns transformers' class for this config that generates text, or pools: of a container the
    one that its checkpoint names, if it names one. None if transformers has none."""
    if is_encoder(config):
        return encoder_class(config)
    mappings = CONTAINERS if is_container(config) else (tf.MODEL_FOR_CAUSAL_LM_MAPPING,)
    found = [kind for mapping in mappings for kind in _kinds(mapping.get(type(config), ()))]
    named = [kind for kind in found if kind.__name__ in (config.architectures or ())]
    return next(iter(named or found), None)


def layers_class(config: Any) -> Any:
    """Returns transformers' class that has the layers of a config's model; the whole model's where
    it names none."""
    text = text_config(config)
    try:
        return tf.MODEL_MAPPING[type(text)] if text is not config else model_class(config)
    except (KeyError, ValueError):  # it names a class that it lacks
        return model_class(config)


def text_class(config: Any) -> Any:
    """Returns what builds a config's model: its class, or of a container a subclass that has the
    language model only. There modules keep their names; built outside of a meta device, only what
    is left gets memory."""
    kind = model_class(config)
    if not is_container(config):
        return kind

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        target = torch.empty(0).device
        with META:
            kind.__init__(self, config, *args, **kwargs)
        for parent, name in list(_other_parts(self)):
            setattr(parent, name, OtherInput(getattr(parent, name)))
        _drop_loose_parameters(self)
        if (decoder := _decoder(self)) is not language_model(self):
            self.forward = decoder.forward  # the container's own needs an image (transformers 5.24)
        if target != META:
            self.to_empty(device=target)
            self.init_weights()

    return type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})


def language_model(model: Any) -> Any:
    """Returns the module that has the layers, of a container or a plain model."""
    return _without_output(_decoder(model))


def other_parts(config: Any) -> frozenset[str]:
    """Returns the names of a model's modules that are no part of its language model, such as
    `vision_tower`; none for one of text alone."""
    if not is_container(config):
        return frozenset()
    with META:
        return frozenset(name for _, name in _other_parts(model_class(config)(config)))


def use_text_alone(model: Any) -> None:
    """Makes a container's forward call its language model at once: its steps before that,
    for images and positions, do not fit packed rows."""
    inner = language_model(model)
    if not is_container(model.config) or inner is model.base_model or inner is not _decoder(model):
        return

    def forward(
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        **_: object,
    ) -> TextOutput:
        given = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
        found = inner(**given, position_ids=position_ids, use_cache=False)
        return TextOutput(last_hidden_state=found.last_hidden_state)

    model.base_model.forward = forward


def _decoder(model: Any) -> Any:
    return model.get_decoder() if is_container(model.config) else model.base_model


def _without_output(decoder: Any) -> Any:
    """Returns what a decoder has before its output layer: that of Llama 4 is a whole causal LM."""
    if decoder.get_output_embeddings() is None:
        return decoder
    return next(child for child in decoder.children() if isinstance(child, tf.PreTrainedModel))


def _kinds(found: Any) -> tuple[Any, ...]:
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def _other_parts(model: Any) -> Iterator[tuple[nn.Module, str]]:
    """Yields, with their parents, the modules with weights that neither hold the language model nor
    are the output layer."""
    inner = language_model(model)
    text = text_config(model.config)
    if text is model.config:
        plan = text.base_model_pp_plan
        yield from ((inner, name) for name in _weighted(inner) if name not in plan)
    kept = {id(inner), id(model.get_output_embeddings())}
    for parent in _path(model, inner):
        on_path = {id(each) for each in _path(model, inner)} | kept
        for name in _weighted(parent):
            if id(getattr(parent, name)) not in on_path:
                yield parent, name


def _weighted(parent: nn.Module) -> list[str]:
    """The names of its children that have weights."""
    children = parent.named_children()
    return [name for name, child in children if next(child.parameters(), None) is not None]


def _path(model: nn.Module, inner: nn.Module) -> list[nn.Module]:
    """The modules around the language model, the model itself first."""
    if inner is model:
        return []
    name = next((name for name, module in model.named_modules() if module is inner), None)
    assert name is not None, "a language model is part of its container"
    parts = name.split(".")
    return [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]


def _drop_loose_parameters(model: Any) -> None:
    """Drops weights of containers themselves, such as the embedding of a line's end in an image:
    an empty tensor, which is no parameter, stays for code that draws its first values."""
    for parent in _path(model, language_model(model)):
        for name, _ in list(parent.named_parameters(recurse=False)):
            delattr(parent, name)
            setattr(parent, name, torch.empty(0))
