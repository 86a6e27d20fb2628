"""What a checkpoint's files say of its vectors and scores, and which of them are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import save_file

from services.stage.model.encoders.encoder_files import read_encoder
from services.stage.model.float_files import with_floats
from services.stage.model.model_info import ModelInfo, model_files
from services.stage.model.shard import build_skeleton
from services.stage.model.weights import fingerprint, unchanged
from shardline.base.errors import Invalid, Unavailable
from shardline.contract.encoders.encoder import EncoderTask
from tests.encoders import (
    CONFIGS,
    SEPARATOR,
    DenseModules,
    save_cross_encoder,
    save_dense,
    save_encoder,
)
from tests.models import edit_config, save_model

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


def test_an_encoder_without_the_padding_that_its_positions_need_is_refused(tmp_path: Path) -> None:
    path = save_encoder(tmp_path, "roberta")
    edit_config(path, pad_token_id=None)
    with pytest.raises(Invalid, match=r"config\.json has pad_token_id None"):
        ModelInfo.read(path)


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


def test_a_decoder_scores_pairs_as_its_tokenizer_joins_them(tmp_path: Path) -> None:
    info = ModelInfo.read(save_cross_encoder(tmp_path, "qwen3"))
    assert info.encoder is not None
    assert (info.encoder.encoder.task, info.encoder.encoder.separator) == (EncoderTask.SCORE, None)


def test_dense_modules_decide_the_vector_and_its_bytes(tmp_path: Path) -> None:
    modules = DenseModules(sizes=(32, 96, 24), bias=True)
    path = save_dense(save_encoder(tmp_path, "gemma3_text"), modules)
    found = read_encoder(path, changed(path, matryoshka_dimensions=[8, 32]))
    assert found is not None
    assert (found.encoder.num_dimensions, found.encoder.shorter) == (24, (8,))
    assert found.num_bytes == 4 * (33 * 96 + 97 * 24)
    assert found.normalizes
    files = {str(file.relative_to(path)) for file in model_files(path)}
    assert {"2_Dense/config.json", "3_Dense/model.safetensors"} <= files


def test_weights_of_dense_modules_are_in_the_fingerprint(tmp_path: Path) -> None:
    path = save_dense(save_encoder(tmp_path, "bert"), DenseModules(sizes=(32, 16)))
    first = fingerprint(path, tmp_path / "cache")
    tensors = {"linear.weight": torch.zeros(16, 32)}
    with pytest.raises(Unavailable, match="was written"), unchanged(path):
        save_file(tensors, path / "2_Dense/model.safetensors")
    assert fingerprint(path, tmp_path / "cache") != first


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"in_features": 31}, "takes 31 numbers, and 32 come"),
        ({"out_features": 15}, r"linear.weight \[16, 32\] of F32, not \[15, 32\]"),
        ({"out_features": 1 << 17}, "out_features 131072, not a number from 1 to 65,536"),
        ({"in_features": None}, "in_features None"),
        ({"bias": True}, "linear.bias none"),
        ({"bias": "no"}, "bias 'no'"),
        ({"activation_function": "os.system"}, "the activation os.system; Identity, Tanh"),
        ({"activation_function": "mine.Tanh"}, "the activation mine.Tanh"),
        ({"module_input_name": "token_embeddings"}, "no product of the pooled vector"),
    ],
)
def test_dense_modules_that_no_stage_can_run_are_refused(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    path = save_dense(save_encoder(tmp_path, "bert"), DenseModules(sizes=(32, 16)))
    settings = json.loads((path / "2_Dense/config.json").read_text())
    rewrite(path, "2_Dense/config.json", settings | changes)
    with pytest.raises(Invalid, match=problem) as refused:
        ModelInfo.read(path)
    assert refused.value.remedy


def test_pickles_and_broken_weights_of_dense_modules_are_refused(tmp_path: Path) -> None:
    path = save_dense(save_encoder(tmp_path, "bert"), DenseModules(sizes=(32, 16)))
    file = path / "2_Dense/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Invalid, match="cut short"):
        ModelInfo.read(path)
    file.rename(file.with_name("pytorch_model.bin"))
    with pytest.raises(Invalid, match=r"only pytorch_model\.bin, no model") as refused:
        ModelInfo.read(path)
    assert "safetensors" in refused.value.remedy


@pytest.mark.parametrize("name", ["../2_Dense", "2_Dense/..", "", 2, None, "dense"])
def test_dense_modules_lie_next_to_the_model(tmp_path: Path, name: object) -> None:
    path = save_dense(save_encoder(tmp_path, "bert"), DenseModules(sizes=(32, 16)))
    modules = json.loads((path / "modules.json").read_text())
    modules[2]["path"] = name
    rewrite(path, "modules.json", modules)
    with pytest.raises(Invalid, match=r"no folder next to it|is a Dense module"):
        ModelInfo.read(path)


def test_a_family_by_name_alone_is_refused_by_its_positions(tmp_path: Path) -> None:
    path = save_encoder(tmp_path, "bert")
    for kind in ("alibi", "rotary"):
        with pytest.raises(Invalid, match=f"'bert' of transformers has no {kind} positions"):
            read_encoder(path, changed(path, position_embedding_type=kind))


def test_a_family_that_rotates_may_say_so(tmp_path: Path) -> None:
    path = save_encoder(tmp_path, "modernbert")
    assert read_encoder(path, changed(path, position_embedding_type="rotary"))


@pytest.mark.parametrize("dimensions", [256, "256", [None], [8.5], [True], [0]])
def test_dimensions_that_are_no_list_of_sizes_are_refused(
    tmp_path: Path, dimensions: object
) -> None:
    path = save_encoder(tmp_path, "bert")
    with pytest.raises(Invalid, match="matryoshka_dimensions"):
        read_encoder(path, changed(path, matryoshka_dimensions=dimensions))


def test_a_decoder_that_sees_later_tokens_needs_a_pooling(tmp_path: Path) -> None:
    path = save_encoder(tmp_path, "gemma3_text")
    (path / "modules.json").unlink()
    for name, problem in (("TextModel", "saved as Gemma3TextModel"), ("ForCausalLM", "attends to")):
        edit_config(path, architectures=[f"Gemma3{name}"])
        with pytest.raises(Invalid, match=problem) as refused:
            ModelInfo.read(path)
        assert "modules.json" in refused.value.remedy


def test_weights_of_another_dtype_are_converted_as_an_encoders(tmp_path: Path) -> None:
    info = ModelInfo.read(save_encoder(tmp_path, "bert"))
    written = with_floats(info, range(4), torch.bfloat16, tmp_path / "cache", converts=True)
    assert written.path != info.path
    kept: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": "eager"}
    assert type(build_skeleton(written, range(4), **kept)).__name__ == "BertModel"


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
