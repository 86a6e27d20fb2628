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
from shardline_server.tokenize import Tokens, chosen_template, model_row
from tests.unit.tokenize.small_tokenizers import byte_level


def row_of(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, Any]:
    """As a head of this folder registers it."""
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return model_row(
        folder, name="m", fingerprint="f", context_length=64, vocab_size=300, eos_ids=()
    )


def tokens_of(folder: Path, tokenizer_config: dict[str, Any]) -> Tokens:
    return Tokens.from_row(row_of(folder, tokenizer_config))


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


def test_a_template_and_a_family_of_replies_can_be_set(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}<tool_call>")
    other = tmp_path / "other.jinja"
    other.write_text("{{ messages[0].content }}!")
    row = row_of(tmp_path, {})
    messages = [Message(role="user", content="a")]

    def chat(**chosen: Any) -> tuple[str, str | None]:
        template = chosen_template(row["chat_template"], **chosen)
        chat = Tokens.from_row({**row, "chat_template": template}).chat
        return chat.family, chat.render(messages, SamplingParams(), limit_chars=64)

    assert chat() == ("hermes", "a<tool_call>")
    assert chat(reply_family="llama") == ("llama", "a<tool_call>")
    assert chat(path=other, reply_family="mistral") == ("mistral", "a!")


def test_a_family_or_a_template_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="'nobody' is no family of models"):
        chosen_template("{{ messages }}", reply_family="nobody")
    with pytest.raises(Invalid, match=r"none\.jinja cannot be read"):
        chosen_template(None, path=tmp_path / "none.jinja")
    with pytest.raises(Invalid, match="no chat template"):
        chosen_template(None, reply_family="llama")
