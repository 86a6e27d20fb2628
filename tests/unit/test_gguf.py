"""Headers of GGUF files are read, and refused where they are broken, hostile or of another kind."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from shardline.base.errors import Invalid
from shardline_costs import ModelCosts
from shardline_gguf import (
    config_of,
    eos_ids,
    files_of,
    model_in,
    read_config,
    read_header,
    read_parts,
)
from tests.gguf_models import write_gguf
from tests.models import save_model

PREAMBLE = struct.Struct("<4sIQQ")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(model: Path) -> Path:
    return write_gguf(model, model.parent / "whole.gguf")


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def tensor(*dimensions: int, kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(dimensions)}Q", *dimensions)
    places = struct.pack("<IQ", kind, offset)
    return text(b"token_embd.weight") + struct.pack("<I", len(dimensions)) + sizes + places


def alignment(value: int) -> bytes:
    return text(b"general.alignment") + struct.pack("<II", 4, value)


HOSTILE = {
    "no magic": (PREAMBLE.pack(b"GGML", 3, 0, 0), "is not a GGUF file"),
    "an old version": (PREAMBLE.pack(b"GGUF", 1, 0, 0), "of version 1"),
    "big-endian": (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "is big-endian"),
    "too many keys": (PREAMBLE.pack(b"GGUF", 3, 0, 1 << 60), "metadata keys"),
    "too many tensors": (PREAMBLE.pack(b"GGUF", 3, 1 << 60, 0), "tensors"),
    "a long key": (
        PREAMBLE.pack(b"GGUF", 3, 0, 1) + struct.pack("<Q", 1 << 62),
        "bytes in a string",
    ),
    "a long array": (
        PREAMBLE.pack(b"GGUF", 3, 0, 1) + text(b"k") + struct.pack("<IIQ", 9, 4, 1 << 61),
        "items in 'k'",
    ),
    "arrays of arrays": (
        PREAMBLE.pack(b"GGUF", 3, 0, 1) + text(b"k") + struct.pack("<IIQ", 9, 9, 1),
        "an array of type 9",
    ),
    "an unknown type": (
        PREAMBLE.pack(b"GGUF", 3, 0, 1) + text(b"k") + struct.pack("<I", 77),
        "of unknown type 77",
    ),
    "no UTF-8": (
        PREAMBLE.pack(b"GGUF", 3, 0, 1) + text(b"\xff\xfe") + struct.pack("<II", 4, 1),
        "not UTF-8",
    ),
    "an odd alignment": (PREAMBLE.pack(b"GGUF", 3, 0, 1) + alignment(24), "alignment 24"),
    "no alignment": (PREAMBLE.pack(b"GGUF", 3, 0, 1) + alignment(0), "alignment 0"),
    "too many dimensions": (
        PREAMBLE.pack(b"GGUF", 3, 1, 0) + tensor(1, 1, 1, 1, 1),
        "of 5 dimensions",
    ),
    "an overflowing shape": (
        PREAMBLE.pack(b"GGUF", 3, 1, 0) + tensor(1 << 40, 1 << 40),
        "of shape",
    ),
    "half a block": (PREAMBLE.pack(b"GGUF", 3, 1, 0) + tensor(33, 2, kind=8), "none of Q8_0"),
    "a type that is not read": (
        PREAMBLE.pack(b"GGUF", 3, 1, 0) + tensor(256, 1, kind=16),
        "of type 16; read are F32",
    ),
    "a tensor outside": (
        PREAMBLE.pack(b"GGUF", 3, 1, 0) + tensor(2, 2, offset=1 << 50),
        "cut short",
    ),
    "a name twice": (
        PREAMBLE.pack(b"GGUF", 3, 2, 0) + tensor(1, 1) + tensor(1, 1) + bytes(99),
        "twice",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused(name: str, tmp_path: Path) -> None:
    content, problem = HOSTILE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(Invalid, match=re.escape(problem)):
        read_header(path)


def test_a_file_cut_short_anywhere_is_refused(whole: Path, tmp_path: Path) -> None:
    content = whole.read_bytes()
    path = tmp_path / "model.gguf"
    header_bytes = content.index(b"output.weight") + 100
    for size in (0, 3, *range(8, header_bytes, 97), len(content) - 64):
        path.write_bytes(content[:size])
        with pytest.raises(Invalid):
            read_header(path)


def test_an_architecture_that_is_not_read_is_refused_with_those_that_are(
    whole: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole.read_bytes().replace(text(b"llama"), text(b"bloom")))
    with pytest.raises(Invalid, match=r"'bloom'; GGUF files are read of cohere2.*llama.*qwen3"):
        read_config(path)


def test_a_split_model_is_found_by_any_part_and_by_its_folder(model: Path, tmp_path: Path) -> None:
    first = write_gguf(model, tmp_path / "m.gguf", part_tensors=9)
    files = files_of(first)
    assert len(files) > 2
    assert files == files_of(files[-1])
    assert model_in(tmp_path) == first
    assert read_parts(first)[1].keys() == read_parts(files[-1])[1].keys()

    files[1].unlink()
    with pytest.raises(Invalid, match=r"lacks m-00002-of-"):
        read_parts(first)


def test_a_folder_of_two_models_asks_for_one(whole: Path, tmp_path: Path) -> None:
    for name in ("a", "b", "mmproj-c"):
        (tmp_path / f"{name}.gguf").write_bytes(whole.read_bytes())
    with pytest.raises(Invalid, match=r"holds 2 GGUF models: a\.gguf, b\.gguf"):
        model_in(tmp_path)


def test_the_planner_knows_what_a_file_weighs(model: Path, tmp_path: Path) -> None:
    path = write_gguf(model, tmp_path / "q8.gguf", kind=GGMLQuantizationType.Q8_0)
    floats = ModelCosts.read(model)
    # In int4 a file keeps its own blocks.
    for each in (path, tmp_path):
        assert replace(ModelCosts.read(each), int4_bytes=floats.int4_bytes) == floats


def test_harmony_ends_a_reply_but_no_part_of_it(model: Path, tmp_path: Path) -> None:
    tokens = ["<|return|>", "<|call|>", "<|end|>", "a"]
    for known, ends in ((tokens, (0, 1)), (["b", *tokens[1:]], (0, 2))):
        metadata = {
            "tokenizer.ggml.tokens": known,
            "tokenizer.ggml.token_type": [3, 3, 3, 1],
            "tokenizer.ggml.eos_token_id": 0,
        }
        path = write_gguf(model, tmp_path / f"{known[0]}.gguf", metadata=metadata)
        assert eos_ids(read_header(path)) == ends


def test_a_key_that_is_not_applied_is_refused_by_name(tmp_path: Path) -> None:
    model = save_model(tmp_path, "gpt-oss")
    for key in ("expert_weights_scale", "attention.key_length_mla"):
        path = write_gguf(model, tmp_path / f"{key}.gguf", metadata={f"gpt-oss.{key}": 2.5})
        with pytest.raises(Invalid, match=rf"has gpt-oss\.{key}, which is not applied"):
            read_config(path)


GEMMA4 = {
    "attention.head_count_kv": ([2, 1, 2, 2], "not one number for each type"),
    "feed_forward_length": ([48, 48, 96, 48], "has gemma4.feed_forward_length"),
    "attention.sliding_window_pattern": ([True, False], "lists 2 layers of 4"),
    "attention.value_length_swa": (24, "heads of 16 in keys and 24 in values"),
    "router_scale": (2.0, "gemma4.router_scale, which is not applied"),
}


@pytest.mark.parametrize("key", GEMMA4)
def test_a_file_that_is_none_of_gemma_4_is_refused(key: str, tmp_path: Path) -> None:
    value, problem = GEMMA4[key]
    header = read_header(write_gguf(save_model(tmp_path, "gemma4"), tmp_path / "model.gguf"))
    metadata = {**header.metadata, f"gemma4.{key}": value}
    with pytest.raises(Invalid, match=re.escape(problem)):
        config_of(replace(header, metadata=metadata), header.tensors)


def test_a_pattern_of_windows_is_applied_to_gpt_oss(tmp_path: Path) -> None:
    header = read_header(write_gguf(save_model(tmp_path, "gpt-oss"), tmp_path / "model.gguf"))
    pattern = {"gpt-oss.attention.sliding_window_pattern": [False, True, True, False]}
    found = config_of(replace(header, metadata={**header.metadata, **pattern}), header.tensors)
    full, window = "full_attention", "sliding_attention"
    assert found["layer_types"] == [full, window, window, full]


def test_a_constant_that_differs_is_refused(tmp_path: Path) -> None:
    header = read_header(write_gguf(save_model(tmp_path, "glm4-moe"), tmp_path / "model.gguf"))
    metadata = {**header.metadata, "glm4moe.expert_gating_func": 1}
    with pytest.raises(Invalid, match=r"has glm4moe\.expert_gating_func 1; read is 2"):
        config_of(replace(header, metadata=metadata), header.tensors)


def test_plans_know_the_bits_of_a_file(tmp_path: Path) -> None:
    model = save_model(tmp_path, hidden_size=256, head_dim=64, intermediate_size=512)
    names = ("Q4_1", "Q8_0")
    files = [
        write_gguf(model, tmp_path / f"{name}.gguf", kind=GGMLQuantizationType[name])
        for name in names
    ]
    floats, in_4_bits, in_8_bits = map(ModelCosts.read, (model, *files))

    assert [each.weight_bytes("int4") for each in (floats, in_4_bits, in_8_bits)] == [
        *(20 / 32, 20 / 32, 34 / 32)
    ]
    assert in_8_bits.weight_bytes("int8") == 1
    # Measured times are of another model only where weights have other sizes
    assert floats.shapes_id == in_4_bits.shapes_id != in_8_bits.shapes_id
