"""The files of a model: whole, broken, fingerprinted."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from services.stage.model.model_info import model_files
from services.stage.model.weights import check_file, fingerprint, unchanged, weight_files
from shardline.base.errors import Invalid, Unavailable
from tests.models import save_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small Llama of its own."""
    return save_model(tmp_path, "llama")


def cut(path: Path, num_bytes: int) -> None:
    """Shortens a file from its end, or with a negative number prolongs it."""
    data = path.read_bytes()
    path.write_bytes(data[:-num_bytes] if num_bytes > 0 else data + bytes(-num_bytes))


def test_the_second_fingerprint_reads_the_cache(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = fingerprint(model, cache)
    (cached,) = cache.iterdir()
    cached.write_text("f" * 64)

    assert first == fingerprint(model, tmp_path / "other")
    assert first != fingerprint(model, cache), "the cache was not read"


def test_one_changed_weight_changes_the_fingerprint(model: Path, tmp_path: Path) -> None:
    first = fingerprint(model, tmp_path / "cache")
    file = model / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(1, 1))

    assert fingerprint(model, tmp_path / "cache") != first


def test_a_flipped_bit_under_the_same_times_changes_the_fingerprint(
    model: Path, tmp_path: Path
) -> None:
    first = fingerprint(model, tmp_path / "cache")
    flip(model / "model.safetensors")

    assert fingerprint(model, tmp_path / "cache") != first


def test_weights_replaced_while_they_are_read_fail_that_start(model: Path) -> None:
    with unchanged(model):
        pass
    with pytest.raises(Unavailable, match="was written while it was read"), unchanged(model):
        flip(model / "model.safetensors")


def flip(file: Path) -> None:
    """Another byte, and the time of modification of before: as a tool that copies times leaves
    it."""
    status = file.stat()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    draft = file.with_name("draft")
    draft.write_bytes(data)
    os.utime(draft, ns=(status.st_atime_ns, status.st_mtime_ns))
    draft.rename(file)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    ],
)
def test_a_changed_text_file_changes_the_fingerprint_and_is_a_models(
    name: str, model: Path, tmp_path: Path
) -> None:
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).touch()
    assert model / name in model_files(model)
    first = fingerprint(model, tmp_path / "cache")
    (model / name).write_text((model / name).read_text() + " ")

    assert fingerprint(model, tmp_path / "cache") != first


def test_fingerprints_work_without_a_writable_cache(model: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")

    assert fingerprint(model, tmp_path / "cache") == fingerprint(model, tmp_path / "other")


@pytest.mark.parametrize(
    ("num_bytes", "what"), [(1, "cut short"), (4000, "cut short"), (-3, "too long")]
)
def test_a_file_of_the_wrong_length_names_both_lengths(
    num_bytes: int, what: str, model: Path
) -> None:
    file = model / "model.safetensors"
    whole = file.stat().st_size
    cut(file, num_bytes)

    with pytest.raises(
        Invalid, match=rf"{what}: {whole - num_bytes:,} bytes, its header says {whole:,}"
    ):
        check_file(file)


@pytest.mark.parametrize(
    "data",
    [b"", b"PK\x03\x04", bytes([255] * 8), b"\x02" + bytes(7) + b"{x", b"\x02" + bytes(7) + b"[]"],
)
def test_a_file_that_is_no_safetensors_is_refused(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)

    with pytest.raises(Invalid, match="safetensors"):
        check_file(file)


def with_header(file: Path, header: bytes, num_bytes: int = 0) -> Path:
    """A safetensors file of this header."""
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(num_bytes))
    return file


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"a": {"dtype": "new", "shape": [1], "data_offsets": [0, Infinity]}}',
        b'{"a": {"dtype": "F32", "shape": [1e400], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": "many", "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 4]}}',
        b'{"a": [1, 2]}',
        b'{"a": "\xff"}',
    ],
    ids=lambda header: header[:70].decode(errors="replace"),
)
def test_a_hostile_header_is_refused(header: bytes, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"safetensors|cut short|too long"):
        check_file(with_header(tmp_path / "model.safetensors", header))


def test_a_hostile_index_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(b"[" * 100_000)

    with pytest.raises(Invalid, match="not a safetensors index"):
        weight_files(tmp_path)


def test_each_of_thousands_of_broken_files_is_refused_or_as_long_as_it_says(model: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    file = model / "model.safetensors"
    whole = file.read_bytes()
    begin = len(whole) - int.from_bytes(whole[:8], "little")
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(dice.randrange(1, 4)):
            data[dice.randrange(len(data) - begin + 8)] = dice.randrange(256)
        file.write_bytes(data)
        try:
            assert check_file(file).size_bytes == len(whole)
        except Invalid:
            continue


def test_a_header_whose_shape_needs_other_bytes_names_the_tensor(tmp_path: Path) -> None:
    header = json.dumps(
        {"embed": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 20]}}
    ).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(20))

    with pytest.raises(Invalid, match=r"embed has 20 bytes for the shape \[2, 3\] of F32"):
        check_file(file)


def test_weights_that_are_only_a_pickle_ask_for_safetensors(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()

    with pytest.raises(
        Invalid, match=r"only pytorch_model\.bin, no model\.safetensors.*save_pretrained"
    ):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ({"weight_map": {"a": "one.safetensors"}}, "lacks one.safetensors"),
        ({"weight_map": {"a": "../one.safetensors"}}, "lacks ../one.safetensors"),
        ({"weight_map": {}}, "lacks weights"),
        ({}, "not a safetensors index"),
        ({"weight_map": [1]}, "not a safetensors index"),
    ],
)
def test_a_broken_index_is_named(index: object, problem: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(Invalid, match=problem):
        weight_files(tmp_path)
