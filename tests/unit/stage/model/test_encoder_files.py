"""What a checkpoint's files say of its vectors and scores, and which of them are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as tf

from services.stage.model.encoder_files import read_encoder
from services.stage.model.model_info import ModelInfo
from shardline.base.errors import Invalid
from shardline.contract.encoders.encoder import EncoderTask
from tests.encoders import CONFIGS, SEPARATOR, save_cross_encoder, save_encoder
from tests.models import save_model

POOLING = "1_Pooling/config.json"


def rewrite(path: Path, name: str, document: object) -> None:
    (path / name).write_text(json.dumps(document))


def changed(path: Path, **changes: Any) -> Any:
    config = tf.AutoConfig.from_pretrained(path)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def test_sentence_transformers_files_decide(tmp_path: Path) -> None:
    info = ModelInfo.read(save_encoder(tmp_path, "bert", longest=100))
    assert info.encoder is not None
    assert (info.encoder.modes, info.encoder.normalizes) == (("mean",), True)
    assert info.context_length == 100
    assert info.encoder.encoder.prompts == {"query": "w7 w8 "}
    assert info.encoder.encoder.num_dimensions == info.hidden_size


def test_without_them_an_encoder_takes_the_mean_and_all_its_positions(tmp_path: Path) -> None:
    path = save_encoder(tmp_path, "roberta")
    for name in ("modules.json", "sentence_bert_config.json"):
        (path / name).unlink()
    info = ModelInfo.read(path)
    assert info.encoder is not None
    assert (info.encoder.modes, info.encoder.normalizes) == (("mean",), False)
    assert info.context_length == CONFIGS["roberta"]().max_position_embeddings - 1


def test_a_decoder_without_them_generates_text(tmp_path: Path) -> None:
    assert ModelInfo.read(save_model(tmp_path, "llama")).encoder is None


def test_several_poolings_stand_side_by_side(tmp_path: Path) -> None:
    path = save_encoder(tmp_path, "bert", normalizes=False)
    rewrite(path, POOLING, {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True})
    found = read_encoder(path, changed(path, matryoshka_dimensions=[8, 16]))
    assert found is not None
    assert (found.modes, found.normalizes) == (("cls", "max"), False)
    assert (found.encoder.num_dimensions, found.encoder.shorter) == (64, (8, 16))


def test_a_cross_encoder_says_how_its_scores_are_made(tmp_path: Path) -> None:
    path = save_cross_encoder(tmp_path, "bert")
    found = read_encoder(path, changed(path))
    assert found is not None
    assert found.encoder.task is EncoderTask.SCORE
    assert (found.is_share, found.encoder.separator) == (True, SEPARATOR)
    identity = "torch.nn.modules.linear.Identity"
    plain = read_encoder(path, changed(path, sbert_ce_default_activation_function=identity))
    assert plain is not None
    assert not plain.is_share


@pytest.mark.parametrize(
    ("name", "document", "problem"),
    [
        (POOLING, {"pooling_mode_mean_tokens": False}, "pools by nothing"),
        (POOLING, {"pooling_mode": "attention"}, "pools by .'attention'."),
        (POOLING, {"pooling_mode_mean_tokens": True, "include_prompt": False}, "prompt's tokens"),
        (POOLING, [], "is no JSON object"),
        ("modules.json", [{"type": "a.Transformer"}, {"type": "a.Dense"}], "Transformer, Dense"),
        ("modules.json", [{"path": ""}], "is malformed"),
        ("modules.json", [], "the modules none"),
    ],
)
def test_files_that_no_stage_can_follow_are_refused(
    tmp_path: Path, name: str, document: object, problem: str
) -> None:
    path = save_encoder(tmp_path, "bert")
    rewrite(path, name, document)
    with pytest.raises(Invalid, match=problem):
        ModelInfo.read(path)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_labels": 3}, "has 3 labels"),
        (
            {"sbert_ce_default_activation_function": "torch.nn.Tanh"},
            "turns scores by",
        ),
    ],
)
def test_heads_that_give_no_score_are_refused(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    path = save_cross_encoder(tmp_path, "bert")
    with pytest.raises(Invalid, match=problem):
        read_encoder(path, changed(path, **changes))
