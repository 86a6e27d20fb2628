"""What a model's folder says about tokens, against transformers on the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from shardline.base.errors import Invalid
from shardline.contract.chat import Message
from shardline.contract.job import SamplingParams
from shardline_server.tokenize import Tokens, model_row
from tests.unit.tokenize.small_tokenizers import byte_level


def tokens_of(folder: Path, tokenizer_config: dict[str, Any]) -> Tokens:
    """As a head of this folder registers them."""
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    row = model_row(
        folder, name="m", fingerprint="f", context_length=64, vocab_size=300, eos_ids=()
    )
    return Tokens.from_row(row)


def test_tokens_that_only_the_configuration_adds_are_tokens(tmp_path: Path) -> None:
    listed = {
        "261": {"content": "<tool>", "special": False},
        "260": {"content": "<|channel|>", "special": True, "lstrip": True},
        "259": {"content": "<|end|>", "special": True},
    }
    fields = {"added_tokens_decoder": listed, "tokenizer_class": "PreTrainedTokenizerFast"}
    tokens = tokens_of(tmp_path, fields)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    text = "a <|channel|>b<tool>c<|end|>"

    ids = tokens.prepare(prompt=text, params=SamplingParams()).prompt_ids

    assert list(ids) == reference(text)["input_ids"]
    assert tokens.completion(SamplingParams(), 60, ()).say(ids) == reference.decode(
        list(ids), skip_special_tokens=True
    )


@pytest.mark.parametrize("listed", [["<tool>"], {"a": {"content": "x"}}, {"260": "x"}, {"260": {}}])
def test_malformed_added_tokens_name_their_file(listed: Any, tmp_path: Path) -> None:
    with pytest.raises(
        Invalid, match=r"added_tokens_decoder in tokenizer_config\.json is malformed"
    ):
        tokens_of(tmp_path, {"added_tokens_decoder": listed})


def row_of(folder: Path, **settings: Any) -> dict[str, Any]:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}<tool_call>")
    return model_row(
        folder,
        name="m",
        fingerprint="f",
        context_length=64,
        vocab_size=300,
        eos_ids=(),
        **settings,
    )


def test_a_template_and_a_family_of_replies_can_be_set(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    other = tmp_path / "other.jinja"
    other.write_text("{{ messages[0].content }}!")
    messages = [Message(role="user", content="a")]

    chat = Tokens.from_row(row_of(tmp_path)).chat
    assert chat.family == "hermes"
    chat = Tokens.from_row(row_of(tmp_path, reply_family="llama")).chat
    assert chat.family == "llama"
    assert chat.render(messages, SamplingParams(), limit_chars=64) == "a<tool_call>"
    chat = Tokens.from_row(row_of(tmp_path, chat_template=other, reply_family="mistral")).chat
    assert chat.family == "mistral"
    assert chat.render(messages, SamplingParams(), limit_chars=64) == "a!"


def test_a_family_or_a_template_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="'nobody' is no family of models"):
        row_of(tmp_path, reply_family="nobody")
    with pytest.raises(Invalid, match=r"none\.jinja cannot be read"):
        row_of(tmp_path, chat_template=tmp_path / "none.jinja")
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(Invalid, match="no chat template"):
        model_row(
            tmp_path,
            name="m",
            fingerprint="f",
            context_length=64,
            vocab_size=300,
            eos_ids=(),
            reply_family="llama",
        )
