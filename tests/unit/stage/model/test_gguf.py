"""GGUF files run as the models that they were converted from: the same weights and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from gguf import GGMLQuantizationType
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from services.stage.device.device import Device
from services.stage.model.float_files import with_floats
from services.stage.model.model_info import ModelInfo
from services.stage.model.weights import fingerprint, weight_files
from services.standalone.settings import CLERK
from shardline.base.errors import Invalid
from shardline.contract.job import SamplingParams
from tests.chain import generate, load_chain, requests
from tests.gguf_models import write_gguf
from tests.gguf_weights import SHIFTED
from tests.models import LATE_SCALE, VOCAB_SIZE, save_model
from tests.pinned import first_core

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 256,
    "partial_rotary_factor": 1.0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # What no header says, llama.cpp computes as all models of these architectures do.
    **{
        name: (name, {})
        for name in (
            "llama",
            "llama-tied",
            "granite",
            "qwen2",
            "qwen3",
            "phi3",
            "starcoder2",
            "nemotron",
            *("gpt-oss", "qwen3-next", "qwen3.5", "qwen3.5-moe", "gemma3n", "gemma4", "gemma4-moe"),
            *("granitemoehybrid", "granite-hybrid-moe", "glm4-moe", "ernie4.5-moe", "olmoe"),
            *("mixtral", "cohere", "cohere2", "hunyuan-dense", "nemotron-h", "falcon-h1"),
            "nemotron-h-moe",
            *(
                "lfm2",
                "gemma",
                "smollm3",
                "olmo2",
                "olmo3",
                "exaone4",
                "glm4",
                "seed-oss",
                "ernie4.5",
            ),
        )
    },
    "qwen3-moe": ("qwen3-moe", {"norm_topk_prob": True}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 16}),
    "llama-3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "qwen2-yarn": (
        "qwen2",
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 128}},
    ),
    "llama-yarn": (
        "llama",
        {
            "head_dim": 64,
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 64,
                "beta_fast": 4.0,
                "beta_slow": 0.5,
            },
        },
    ),
    "phi3-long": (
        "phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 256},
    ),
    "exaone4-small": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "ministral3": (
        "ministral3",
        {"rope_parameters": {**LATE_SCALE, "mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
}
NUM_NEW = 12
TEXTS = (
    "The invoice of 12,345.60 EUR was paid on 2024-03-05.\n\n  It isn't due.",
    "<bos>Hello<eos> <pad>",
    "def f(x):\n\treturn x ** 2  # \u00fc\u4f60\u597d \U0001f600",
)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    with first_core(tmp_path / "locks") as device:
        yield device


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in (3, 41, 130)
    ]


def reference(path: Path) -> list[tuple[int, ...]]:
    """Each prompt alone through transformers' greedy `generate` in float32."""
    model = tf.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    model.generation_config.eos_token_id = None
    found = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            pad_token_id=0,
        )
        found.append(tuple(out[0, len(prompt) :].tolist()))
    return found


def floats(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    return found


@pytest.mark.parametrize(
    "name", ["llama-3", "gemma3", "qwen3-moe", "lfm2", "qwen3.5", "gemma4-moe"]
)
def test_stages_of_a_file_give_the_tokens_of_the_model_that_it_was_converted_from(
    name: str, device: Device, tmp_path: Path
) -> None:
    kind, changes = MODELS[name]
    model = save_model(tmp_path, kind, **changes)
    path = write_gguf(model, tmp_path / "model.gguf")
    expected = reference(model)

    for num_stages in (1, 2, 3):
        stages = load_chain(path, num_stages, device, tmp_path / "cache")
        greedy = SamplingParams(max_tokens=NUM_NEW, temperature=0.0)
        assert generate(stages, requests(prompts(), greedy), budget=32) == expected
        assert all(stage.exact for stage in stages)
    assert len({token for output in expected for token in output}) > 2, "too dull to tell"


def test_a_file_in_int8_or_with_streamed_layers_gives_the_tokens_of_its_model(
    device: Device, tmp_path: Path
) -> None:
    model = save_model(tmp_path)
    path = write_gguf(model, tmp_path / "model.gguf")
    greedy = SamplingParams(max_tokens=NUM_NEW, temperature=0.0)
    for limits in (
        {"dtype": "int8"},
        {"dtype": "bfloat16", "streamed_layers": 1, "streamed_folder": tmp_path},
    ):
        found = [
            generate(
                load_chain(each, 2, device, tmp_path / "cache", **limits),
                requests(prompts(), greedy),
                budget=32,
            )
            for each in (path, model)
        ]
        assert found[0] == found[1]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_model_at_every_position(name: str, tmp_path: Path) -> None:
    kind, changes = MODELS[name]
    model = save_model(tmp_path, kind, **changes)
    info = ModelInfo.read(write_gguf(model, tmp_path / "model.gguf"), cache_folder=tmp_path)
    ids = torch.randint(3, VOCAB_SIZE, (1, 300), generator=torch.Generator().manual_seed(1))
    found, expected = (
        tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
        for folder in (with_floats(info, range(4), torch.float32, tmp_path).path, model)
    )
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


# Falcon-H1's factors are part of its weights there.
@pytest.mark.parametrize("name", [name for name in MODELS if name != "falcon-h1"])
def test_every_weight_comes_back_to_the_last_bit(name: str, tmp_path: Path) -> None:
    kind, changes = MODELS[name]
    model = save_model(tmp_path, kind, **changes)
    info = ModelInfo.read(write_gguf(model, tmp_path / "model.gguf"), cache_folder=tmp_path)
    expected = {
        weight.replace("backbone.", "model."): tensor for weight, tensor in floats(model).items()
    }
    found = floats(with_floats(info, range(4), torch.float32, tmp_path).path)
    if info.config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    assert found.keys() == expected.keys()
    # llama.cpp stores some norms with the 1 that a model adds, and logarithms of decays as decays,
    # which costs their last bits
    is_shifted = kind in SHIFTED or kind.startswith(("qwen3-next", "qwen3.5"))
    for weight, tensor in expected.items():
        if weight.endswith("A_log") or (is_shifted and weight.endswith("norm.weight")):
            assert torch.allclose(found[weight], tensor, atol=3e-7), weight
        else:
            assert torch.equal(found[weight], tensor), weight


TYPES = ("F32", "F16", "BF16", "MXFP4", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
"""Those that the `gguf` package reads, but does not write."""


@pytest.mark.parametrize("name", [*TYPES, *K_TYPES])
def test_numbers_of_each_type_are_those_that_transformers_reads(name: str, tmp_path: Path) -> None:
    kind = GGMLQuantizationType[name]
    model = save_model(tmp_path, hidden_size=256, head_dim=64, num_hidden_layers=1)
    path = tmp_path / "model.gguf"
    if name in TYPES:
        write_gguf(model, path, kind=kind)
    else:
        write_gguf(model, path, raw=kind)
    info = ModelInfo.read(path, cache_folder=tmp_path)
    found = floats(with_floats(info, range(1), torch.float32, tmp_path).path)
    oracle = tf.AutoModelForCausalLM.from_config(info.config)
    expected = load_gguf_checkpoint(path, return_tensors=True, model_to_load=oracle)["tensors"]
    assert found.keys() == expected.keys()
    for weight, tensor in expected.items():
        assert torch.equal(found[weight], tensor), weight
    assert any(not torch.equal(found[weight], found[weight].round()) for weight in found)


def test_a_rope_of_2023_is_scaled_by_the_factor_that_names_no_type(tmp_path: Path) -> None:
    model = save_model(tmp_path)
    for factor, limit in ((1.0, 512), (4.0, 2048)):
        path = tmp_path / f"{factor}.gguf"
        write_gguf(model, path, metadata={"llama.rope.scale_linear": factor})
        info = ModelInfo.read(path, cache_folder=tmp_path)
        rope = info.config.rope_parameters
        assert (rope["rope_type"], rope.get("factor", 1.0)) == (
            "default" if factor == 1 else "linear",
            factor,
        )
        assert info.context_length == limit


@pytest.mark.parametrize("key", ["yarn_attn_factor", "attn_factor"])
def test_a_factor_of_attention_that_is_not_yarns_is_refused(key: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, **MODELS["llama-yarn"][1])
    for factor in (1.0, 0.1 * log(4.0) + 1.0):
        path = tmp_path / f"{factor}.gguf"
        write_gguf(model, path, metadata={f"llama.rope.scaling.{key}": factor})
        rope = ModelInfo.read(path, cache_folder=tmp_path).config.rope_parameters
        assert rope.get("attention_factor") is None

    path = tmp_path / "other.gguf"
    write_gguf(model, path, metadata={f"llama.rope.scaling.{key}": 0.75})
    with pytest.raises(Invalid, match=rf"has llama\.rope\.scaling\.{key} 0\.75; read are 1 and"):
        ModelInfo.read(path, cache_folder=tmp_path)


def test_layers_that_draft_ahead_are_none_of_the_models(tmp_path: Path) -> None:
    model = save_model(tmp_path, "qwen3.5")
    ahead = {"qwen35.nextn_predict_layers": 1}
    path = write_gguf(model, tmp_path / "model.gguf", metadata=ahead)
    info = ModelInfo.read(path, cache_folder=tmp_path)
    found = floats(with_floats(info, range(3), torch.float32, tmp_path).path)
    assert info.num_layers == 3
    expected = {name for name in floats(model) if "layers.3." not in name}
    assert found.keys() == expected


def test_a_stage_unpacks_its_own_layers_alone(tmp_path: Path) -> None:
    path = write_gguf(save_model(tmp_path), tmp_path / "model.gguf")
    info = ModelInfo.read(path, cache_folder=tmp_path)
    first = with_floats(info, range(2), torch.bfloat16, tmp_path).path
    assert {file.name for file in first.parent.glob("*.safetensors")} == {
        f"{part}.safetensors" for part in ("rest", "layer-0", "layer-1")
    }


def test_a_split_file_a_folder_and_another_name_are_one_model(tmp_path: Path) -> None:
    model = save_model(tmp_path)
    expected = floats(model)
    one = write_gguf(model, tmp_path / "one.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    first = write_gguf(model, folder / "two.gguf", part_tensors=9)
    split = ModelInfo.read(first, cache_folder=tmp_path)
    assert ModelInfo.read(folder, cache_folder=tmp_path).path == split.path
    found = floats(with_floats(split, range(4), torch.float32, tmp_path).path)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())

    renamed = one.with_name("other.gguf")
    known = fingerprint(ModelInfo.read(one, cache_folder=tmp_path).path, tmp_path)
    one.rename(renamed)
    other = ModelInfo.read(renamed, cache_folder=tmp_path).path
    assert fingerprint(other, tmp_path) == known
    content = bytearray(renamed.read_bytes())
    content[-1] ^= 1
    renamed.write_bytes(content)
    changed = ModelInfo.read(renamed, cache_folder=tmp_path).path
    assert fingerprint(changed, tmp_path) != known


def test_a_tensor_that_the_architecture_does_not_have_is_refused(tmp_path: Path) -> None:
    path = write_gguf(save_model(tmp_path), tmp_path / "model.gguf")
    content = path.read_bytes().replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight")
    path.write_bytes(content)
    info = ModelInfo.read(path, cache_folder=tmp_path)
    with pytest.raises(Invalid, match=r"ffn_xx.weight', which llama does not have"):
        with_floats(info, range(4), torch.float32, tmp_path)


def test_a_weight_without_one_of_its_parts_is_refused(tmp_path: Path) -> None:
    model = save_model(tmp_path, "gpt-oss")
    ahead = {"gpt-oss.nextn_predict_layers": 1}
    path = write_gguf(model, tmp_path / "model.gguf", metadata=ahead)
    content = path.read_bytes()
    for old, new in ((b"3.ffn_up_exps.b", b"3.ffn_xx_exps.b"), (b"1.ffn_up_exps.b",) * 2):
        content = content.replace(b"blk." + old, b"blk." + new.replace(b"1.", b"3."))
    path.write_bytes(content)
    info = ModelInfo.read(path, cache_folder=tmp_path)
    with pytest.raises(
        Invalid, match=r"has only 'blk\.1\.ffn_gate_exps\.bias' of model\.layers\.1"
    ):
        with_floats(info, range(3), torch.float32, tmp_path)


def test_the_demo_models_texts_are_tokenized_as_its_own_tokenizer_does(tmp_path: Path) -> None:
    path = write_gguf(CLERK, tmp_path / "clerk.gguf")
    found = ModelInfo.read(path, cache_folder=tmp_path)
    own = ModelInfo.read(CLERK)
    row, expected = (each.row(name="clerk", fingerprint="w") for each in (found, own))
    tokens, own_tokens = (Tokenizer.from_str(each["tokenizer"]) for each in (row, expected))
    for text in TEXTS:
        assert tokens.encode(text).ids == own_tokens.encode(text).ids
        ids = tokens.encode(text).ids
        assert tokens.decode(ids) == own_tokens.decode(ids)
    for field in ("chat_template", "eos_token_ids", "context_length", "vocab_size"):
        assert row[field] == expected[field]
    special = expected["special_tokens"]
    assert {name: row["special_tokens"].get(name) for name in special} == special
