"""What config.json and generation_config.json say, and values in them that mean nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from structlog.testing import capture_logs

from services.stage.device.device import Device
from services.stage.model.model_info import ModelInfo
from shardline.base.errors import Invalid
from shardline.contract.job import SamplingParams
from tests.chain import generate, load_chain, requests
from tests.encoders import save_encoder
from tests.models import edit_config, save_model
from tests.pinned import first_core

PROMPT = [3, 17, 9, 40, 8]
SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    with first_core(tmp_path / "locks") as device:
        yield device


@pytest.mark.parametrize("field", ["torch_dtype", "dtype"])
@pytest.mark.parametrize("dtype", ["bf16", "torch.bfloat16", "auto"])
def test_a_dtype_that_torch_does_not_name_is_refused_by_its_field(
    field: str, dtype: str, tmp_path: Path
) -> None:
    path = save_model(tmp_path)
    edit_config(path, **{"dtype": None, field: dtype})

    with pytest.raises(Invalid, match=rf"config\.json has {field} '{dtype}'") as refused:
        ModelInfo.read(path)
    assert refused.value.remedy == "Write bfloat16, float16 or float32"


@pytest.mark.parametrize(
    "field", ["num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings"]
)
def test_a_size_of_zero_is_refused_by_its_field(field: str, tmp_path: Path) -> None:
    path = save_model(tmp_path)
    edit_config(path, **{field: 0})

    with pytest.raises(Invalid, match=rf"config\.json has {field} 0") as refused:
        ModelInfo.read(path)
    assert refused.value.remedy == "Write the model's own number"


def test_what_a_class_of_configs_raises_is_a_refusal(tmp_path: Path) -> None:
    path = save_model(tmp_path)
    edit_config(path, id2label=[1])

    with pytest.raises(Invalid, match=r"transformers refuses .*config\.json"):
        ModelInfo.read(path)


@pytest.mark.parametrize(
    ("said", "stated", "ids"),
    [(-1, 2, (2,)), ([-1, 7], 2, (7,)), (-1, -1, ()), (None, [-1, 5], (5,))],
)
def test_negative_ends_mean_none(said: Any, stated: Any, ids: Any, tmp_path: Path) -> None:
    path = save_model(tmp_path)
    edit_config(path, eos_token_id=stated)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))

    assert ModelInfo.read(path).eos_ids == ids


@pytest.mark.parametrize("types", [[SLIDING] * 4, [FULL, SLIDING] * 2])
def test_a_config_that_transformers_takes_for_another_familys_is_served_as_its(
    types: list[str], tmp_path: Path, device: Device
) -> None:
    path = save_model(tmp_path, "mistral")
    edit_config(path, layer_types=types)
    model = tf.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    prompt = PROMPT * 8
    found = model.generate(
        torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)

    stages = load_chain(path, 2, device, tmp_path / "cache")
    assert generate(stages, requests([prompt], params), budget=32) == [
        tuple(found[0, len(prompt) :].tolist())
    ]


def test_layers_in_a_folder_of_their_own_are_refused_with_the_way_out(tmp_path: Path) -> None:
    path = save_encoder(tmp_path, "bert")
    inner = path / "0_Transformer"
    inner.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (path / name).rename(inner / name)

    with pytest.raises(Invalid, match=r"has no config\.json") as refused:
        ModelInfo.read(path)
    assert "move the files of 0_Transformer up" in refused.value.remedy
    for file in inner.iterdir():
        file.rename(path / file.name)
    assert ModelInfo.read(path).encoder is not None


RULES: dict[str, Any] = {
    "suppress_tokens": [5],
    "begin_suppress_tokens": [6],
    "bad_words_ids": [[7, 8]],
    "sequence_bias": [[[9], 2.0]],
    "no_repeat_ngram_size": 2,
    "forced_eos_token_id": 0,
    "num_beams": 4,
}
NEUTRAL: dict[str, Any] = {
    "suppress_tokens": [],
    "bad_words_ids": None,
    "no_repeat_ngram_size": 0,
    "forced_eos_token_id": None,
    "num_beams": 1,
    "temperature": 0.7,
}


@pytest.mark.parametrize(("said", "fields"), [(RULES, set(RULES)), (NEUTRAL, None)])
def test_rules_that_no_stage_applies_are_warned_of_once_by_name(
    said: dict[str, Any], fields: set[str] | None, tmp_path: Path
) -> None:
    path = save_model(tmp_path)
    (path / "generation_config.json").write_text(json.dumps(said))

    with capture_logs() as logs:
        ModelInfo.read(path).row(name="m", fingerprint="f")

    assert [set(each["fields"]) for each in logs] == ([] if fields is None else [fields])
    assert all("send logit_bias, bad_words" in each["event"] for each in logs)
