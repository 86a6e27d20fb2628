"""Shards: what is loaded, what is kept out, and which models are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers.quantizers import quantizer_finegrained_fp8

from services.stage.attention.paged_kv import KvShape
from services.stage.model.kv_shapes import probe_kv_shapes
from services.stage.model.model_info import ModelInfo
from services.stage.model.pieces import PassThrough
from services.stage.model.shard import Shard, build_skeleton
from services.stage.products.packing import UNPACKED, packed_bytes
from shardline.base.errors import Invalid
from tests.models import COMMON, edit_config, save_model

WEIGHTS = "model.safetensors"
QUANTIZED: dict[str, Any] = {**COMMON, "quantization_config": {"quant_method": "bitsandbytes"}}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    return save_model(tmp_path_factory.mktemp("models"), "llama")


def load(path: Path | ModelInfo, layers: range, **options: Any) -> Shard:
    """On the CPU in float32."""
    cpu = torch.device("cpu")
    return Shard.load(
        path, layers, dtype=torch.float32, attn_implementation="eager", device=cpu, **options
    )


def num_bytes(shard: Shard) -> int:
    """Of its weights."""
    return sum(p.numel() * p.element_size() for p in shard.model.parameters())


def test_the_limits_of_a_model_are_read_without_weights(llama: Path) -> None:
    info = ModelInfo.read(llama)

    assert (info.num_layers, info.context_length, info.vocab_size, info.hidden_size) == (
        4,
        512,
        96,
        32,
    )
    assert info.eos_ids == (2,)


@pytest.mark.parametrize(("eos", "ids"), [([2, 7], (2, 7)), (7, (7,)), (None, (2,))])
def test_the_ends_of_a_generation_config_count(
    eos: Any, ids: tuple[int, ...], tmp_path: Path
) -> None:
    path = save_model(tmp_path)
    tf.GenerationConfig(eos_token_id=eos).save_pretrained(path)

    assert ModelInfo.read(path).eos_ids == ids


@pytest.mark.parametrize(
    ("said", "ids"),
    [
        ({"do_sample": True, "max_new_tokens": 0, "eos_token_id": 2}, (2,)),
        ({"temperature": -3, "eos_token_id": [2, 7]}, (2, 7)),
        ({"eos_token_id": 0}, (0,)),
    ],
)
def test_settings_of_a_generation_config_that_nobody_reads_refuse_no_model(
    said: dict[str, Any], ids: tuple[int, ...], tmp_path: Path
) -> None:
    path = save_model(tmp_path)
    (path / "generation_config.json").write_text(json.dumps(said))
    assert ModelInfo.read(path).eos_ids == ids


@pytest.mark.parametrize("said", ["{", "[]", '{"eos_token_id": "2"}', '{"eos_token_id": [true]}'])
def test_a_generation_config_without_a_readable_end_is_refused_by_name(
    said: str, tmp_path: Path
) -> None:
    path = save_model(tmp_path)
    (path / "generation_config.json").write_text(said)
    with pytest.raises(Invalid, match=r"generation_config\.json"):
        ModelInfo.read(path)


@pytest.mark.parametrize(
    ("named", "ids"),
    [
        ("<|im_end|>", (2, 5)),
        ({"content": "<|im_end|>"}, (2, 5)),
        ("</s>", (2,)),
        ("<gone>", (2,)),
        (None, (2,)),
    ],
)
def test_the_end_that_the_tokenizer_names_is_one_too(
    named: Any, ids: tuple[int, ...], tmp_path: Path
) -> None:
    path = save_model(tmp_path)
    tf.GenerationConfig(eos_token_id=2).save_pretrained(path)
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "</s>": 2, "c": 3, "d": 4}, unk_token="a"))
    tokenizer.add_special_tokens(["</s>", "<|im_end|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))

    assert ModelInfo.read(path).eos_ids == ids


@pytest.mark.parametrize("vocab_size", [95, 97])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_vocabulary_of_another_size_than_the_embedding_is_refused(
    name: str, vocab_size: int, tmp_path: Path
) -> None:
    path = save_model(tmp_path, name)
    edit_config(path, vocab_size=vocab_size)

    with pytest.raises(
        Invalid, match=f"vocab_size is {vocab_size} in config.json, and .* has 96 rows"
    ):
        ModelInfo.read(path)


def test_a_middle_shard_loads_only_its_layers(llama: Path) -> None:
    whole = load(llama, range(4))
    middle = load(llama, range(1, 3))

    assert num_bytes(middle) < num_bytes(whole) / 2
    assert [type(layer) is PassThrough for layer in middle.decoder.layers] == [
        True,
        False,
        False,
        True,
    ]
    assert isinstance(middle.model.lm_head, PassThrough)


def test_head_and_tail_have_tied_embeddings(tmp_path: Path) -> None:
    path = save_model(tmp_path, "llama-tied")
    head = load(path, range(2))
    tail = load(path, range(2, 4))

    assert torch.equal(head.decoder.embed_tokens.weight, tail.model.lm_head.weight)


@pytest.mark.parametrize(
    ("name", "embedding"),
    [("llama-tied", "model.embed_tokens.weight"), ("gpt2", "transformer.wte.weight")],
)
def test_a_head_reads_its_tied_embedding_under_the_name_of_the_output(
    name: str, embedding: str, tmp_path: Path
) -> None:
    path = save_model(tmp_path, name)
    expected = load(path, range(2))
    tensors = load_file(path / WEIGHTS)
    tensors["lm_head.weight"] = tensors.pop(embedding)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})

    found = load(path, range(2))

    assert sizes(found.model) == sizes(expected.model)
    for each, parameter in expected.model.named_parameters():
        assert torch.equal(found.model.get_parameter(each), parameter), each


def test_each_layer_of_a_shard_tells_its_heads(llama: Path) -> None:
    assert probe_kv_shapes(load(llama, range(1, 3))) == {
        layer: KvShape(num_kv_heads=2, head_dim=8, value_head_dim=8) for layer in (1, 2)
    }


@pytest.mark.parametrize("layers", [range(2, 2), range(3, 5), range(-1, 2), range(0, 4, 2)])
def test_layers_that_do_not_exist_name_the_split(layers: range, llama: Path) -> None:
    with pytest.raises(Invalid, match="SHARDLINE_SPLIT: the model has layers 0-3"):
        load(llama, layers)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2", "mixtral"])
@pytest.mark.parametrize("layers", [range(4), range(2), range(1, 3), range(2, 4)])
def test_a_skeleton_has_the_sizes_of_the_shard(name: str, layers: range, tmp_path: Path) -> None:
    info = ModelInfo.read(save_model(tmp_path, name))

    skeleton = build_skeleton(info, layers, dtype=torch.float32, attn_implementation="eager")

    assert all(each.is_meta for each in skeleton.parameters())
    assert sizes(skeleton) == sizes(load(info.path, layers).model)


def sizes(model: nn.Module) -> dict[str, torch.Size]:
    """Of all parameters by name, tied ones under each."""
    return {name: each.shape for name, each in model.named_parameters(remove_duplicate=False)}


def test_tied_weights_count_twice_before_they_are_read(tmp_path: Path) -> None:
    info = ModelInfo.read(save_model(tmp_path, "llama-tied"))
    layers = range(4)

    skeleton = build_skeleton(info, layers, dtype=torch.float32, attn_implementation="eager")

    embedding_bytes = skeleton.get_input_embeddings().weight.nbytes
    loaded_bytes = num_bytes(load(info.path, layers))
    assert packed_bytes(skeleton, UNPACKED) == loaded_bytes + embedding_bytes


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (tf.T5Config(), "'t5' is an encoder-decoder"),
        (tf.GlmMoeDsaConfig(), "'glm_moe_dsa' has layers of type indexed_attention"),
        (tf.GitConfig(), "'git' is multimodal in one piece"),
        (tf.ViTConfig(), "'vit' is not a causal LM"),
        (tf.FalconConfig(), "'falcon' does not attend through transformers' attention interface"),
        (tf.RwkvConfig(), "'rwkv' keeps a state that goes from token to token"),
        (tf.MambaConfig(), "'mamba' has recurrent layers alone, without attention"),
        (
            tf.LlamaConfig(architectures=["LlamaForSequenceClassification"]),
            "LlamaForSequenceClassification has 2 labels; a cross-encoder has one",
        ),
        (tf.LlamaConfig(**QUANTIZED), "it is quantized by bitsandbytes"),
        (tf.LlamaConfig(**COMMON), r"no weights, no model\.safetensors"),
    ],
)
def test_a_model_that_cannot_be_sharded_names_the_reason(
    config: Any, reason: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)

    with pytest.raises(Invalid, match=reason) as caught:
        ModelInfo.read(tmp_path)

    assert caught.value.remedy


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            '{"model_type": "mine", "auto_map": {"AutoModel": "code.Mine"}}',
            "needs remote code, which is never run",
        ),
        ('{"model_type": "mine"}', "is unknown to this transformers"),
        ("{}", "not a model's config"),
        ("[]", "not a model's config"),
        ("{", "not a model's config"),
        ('{"model_type": "llama", "num_attention_heads": "many"}', "transformers refuses"),
    ],
)
def test_an_invalid_config_names_its_file(config: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)

    with pytest.raises(Invalid, match=reason):
        ModelInfo.read(tmp_path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("no/such/folder", "neither a folder nor a hub id"), (".", "no config.json")],
)
def test_a_missing_model_is_named(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(Invalid, match=reason):
        ModelInfo.read(name)


def test_a_missing_tensor_is_named_by_the_shard_that_needs_it(tmp_path: Path) -> None:
    path = save_model(tmp_path)
    tensors = load_file(path / WEIGHTS)
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})

    load(path, range(2))
    with pytest.raises(Invalid, match=r"missing_keys model\.layers\.3\.mlp\.up_proj\.weight"):
        load(path, range(2, 4))


def test_tensors_of_another_shape_than_the_config_are_named(tmp_path: Path) -> None:
    path = save_model(tmp_path)
    edit_config(path, intermediate_size=64)

    with pytest.raises(Invalid, match=r"(?s)model\.layers\.0\.mlp\.(up|down|gate)_proj"):
        load(path, range(1))


def test_a_library_that_transformers_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: False)
    path = save_model(tmp_path)
    edit_config(path, quantization_config={"quant_method": "fp8"})

    with pytest.raises(Invalid, match=r"transformers needs a library to load .*accelerate"):
        load(path, range(2))


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    path = save_model(tmp_path)
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-1])

    with pytest.raises(Invalid, match="cut short"):
        load(path, range(2))


class Odd(nn.Module):
    """A layer that does more than hidden states allow."""

    def __init__(self, layer: nn.Module, *, gives_tuple: bool) -> None:
        super().__init__()
        self.layer = layer
        self._gives_tuple = gives_tuple

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer, and maybe something beside."""
        out = self.layer(*args, **kwargs)
        return (out, None) if self._gives_tuple else out


def test_a_layer_that_returns_a_tuple_is_refused(llama: Path) -> None:
    shard = load(llama, range(2))
    shard.layer_modules[0] = shard.decoder.layers[0] = Odd(shard.layer_modules[0], gives_tuple=True)

    with pytest.raises(Invalid, match="Odd returns a tuple"):
        probe_kv_shapes(shard)


def test_a_layer_with_another_input_is_refused(llama: Path) -> None:
    shard = load(llama, range(2))
    odd = shard.layer_modules[1] = shard.decoder.layers[1] = Odd(
        shard.layer_modules[1], gives_tuple=False
    )

    def add_input(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
        return args, {**kwargs, "memory": torch.zeros(1)}

    odd.register_forward_pre_hook(add_input, with_kwargs=True)

    with pytest.raises(Invalid, match="Odd takes memory besides hidden states"):
        probe_kv_shapes(shard)
