"""transformers' class of a model that pools: its layers without an output layer, or with a head for
one score. Knows no files."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import transformers as tf

from services.stage.model.encoders.distance_bias import PADDING, biases_by_distance
from services.stage.model.refusal import refuse

POOLS = "shardline_pools"
"""The mark in the config of a model that pools."""
SCORES = "ForSequenceClassification"
CREATES_POSITIONS = "create_position_ids_from_input_ids"
"""The function of modeling files in which positions begin behind the padding's."""


def mark(config: Any) -> None:
    """Makes a config that of a model that pools: `model_class` and all that follows then take it
    for one."""
    setattr(config, POOLS, True)


def is_encoder(config: Any) -> bool:
    """Returns whether a model of this config pools."""
    return bool(getattr(config, POOLS, False))


def scores_pairs(config: Any) -> bool:
    """Returns whether its checkpoint has a head for scores."""
    return bool(config.architectures) and config.architectures[0].endswith(SCORES)


def is_masked_lm(config: Any) -> bool:
    """Returns whether transformers trains models of this config to fill gaps: their rows see later
    ones too."""
    return type(config) in tf.MODEL_FOR_MASKED_LM_MAPPING and not _is_decoder(config)


def _is_decoder(config: Any) -> bool:
    return bool(getattr(config, "is_decoder", False))


def sees_both_ways(config: Any) -> bool:
    """Returns whether rows of a model that pools see later ones of their text."""
    is_bidirectional = getattr(config, "use_bidirectional_attention", None) is True
    return is_encoder(config) and (is_bidirectional or is_masked_lm(config))


def encoder_class(config: Any) -> Any:
    """Returns the class of a model that pools; None if transformers has none."""
    if scores_pairs(config):
        mapping: Any = tf.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        return mapping.get(type(config), None)
    kind: Any = tf.MODEL_MAPPING.get(type(config), None)
    if kind is None or "add_pooling_layer" not in inspect.signature(kind.__init__).parameters:
        return kind

    def init(self: Any, config: Any, *_: Any, **__: Any) -> None:
        kind.__init__(self, config, add_pooling_layer=False)

    return type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})


def number_attention(layers: Any) -> None:
    """Gives attention modules the numbers of their layers, by which attention finds its keys;
    encoders' own code has no use for them."""
    for number, layer in enumerate(layers):
        for module in layer.modules():
            if hasattr(module, "is_causal") and getattr(module, "layer_idx", None) is None:
                module.layer_idx = number


def first_position(config: Any) -> int:
    """Returns the number of a text's first position: RoBERTa's begin behind the padding's. Raises
    Invalid without one."""
    if biases_by_distance(encoder_class(config)):
        return PADDING + 1
    names = vars(sys.modules[encoder_class(config).__module__]).values()
    creates = any(inspect.isclass(each) and hasattr(each, CREATES_POSITIONS) for each in names)
    if not creates:
        return 0
    padding = config.pad_token_id
    if type(padding) is not int:
        refuse(
            f"config.json has pad_token_id {padding!r}, and positions begin behind it",
            "Write the tokenizer's, which is 1 in RoBERTa's",
        )
    return padding + 1
