"""Texts are cut into the tokens of GGUF headers as the model's own tokenizers cut them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from services.stage.model.gguf.gguf_tokenizer import tokenizer_of
from services.standalone.settings import CLERK
from shardline_gguf import GgufHeader, read_header
from tests.gguf_models import write_gguf
from tests.models import save_model

TEXTS = (
    "The invoice of 12,345.60 EUR was paid on 2024-03-05.\n\n  It isn't due.",
    "def f(x):\n\treturn x ** 2  # \u00fc\u4f60\u597d \U0001f600",
    "nai\u0308ve \u0928\u092e\u0938\u094d\u0924\u0947 1234",
)


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> GgufHeader:
    return read_header(write_gguf(CLERK, tmp_path_factory.mktemp("model") / "clerk.gguf"))


def cut_by(header: GgufHeader, rule: str) -> Tokenizer:
    metadata = {**header.metadata, "tokenizer.ggml.pre": rule}
    found = tokenizer_of(replace(header, metadata=metadata))
    assert found is not None
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_cut_as_qwen_3_5_cuts_it(text: str, header: GgufHeader) -> None:
    found, expected = cut_by(header, "qwen35"), Qwen3_5Tokenizer().backend_tokenizer
    assert found.normalizer.normalize_str(text) == expected.normalizer.normalize_str(text)
    own = expected.pre_tokenizer.pre_tokenize_str(text)
    assert found.pre_tokenizer.pre_tokenize_str(text) == own


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("lfm2", ["It", "'s", "\u0120", "123", "45", "\u0120\u00e4\u00bd\u0142", "!\u010a"]),
        ("glm4", ["It", "'s", "\u0120", "123", "45", "\u0120\u00e4\u00bd\u0142", "!\u010a"]),
        ("seed-coder", ["It", "'s", "\u0120", *"12345", "\u0120\u00e4\u00bd\u0142", "!", "\u010a"]),
        ("exaone4", ["It", "'s", "\u012012345", "\u0120\u00e4\u00bd\u0142", "!", "\u010a"]),
        (
            "deepseek-v3",
            ["It", "'s", "\u0120", "123", "45", "\u0120", "\u00e4\u00bd\u0142", "!\u010a"],
        ),
    ],
)
def test_text_is_cut_by_rules_of_other_families(
    rule: str, expected: list[str], header: GgufHeader
) -> None:
    pieces = cut_by(header, rule).pre_tokenizer.pre_tokenize_str("It's 12345 \u4f60!\n")
    assert [piece for piece, _ in pieces] == expected


def test_gemma_4_has_pieces_with_merges(tmp_path: Path) -> None:
    tokens = ["<pad>", "<bos>", "\u2581", "a", "b", "ab", "\u2581ab", "<turn|>"]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 1, 3],
        "tokenizer.ggml.merges": ["a b", "\u2581 ab"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }
    path = write_gguf(save_model(tmp_path), tmp_path / "model.gguf", metadata=metadata)
    tokenizer = tokenizer_of(read_header(path))
    assert tokenizer is not None
    assert tokenizer.encode("ab ab<turn|>").tokens == ["<bos>", "ab", "\u2581ab", "<turn|>"]
    assert tokenizer.decode([1, 5, 6]) == "ab ab"
