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
from shardline_server.tokenize import Tokens, chosen_template, model_row, tokenizers_eos_id
from shardline_server.tokenize.chat import ChatTemplate
from shardline_server.tokenize.template_abilities import TOOLS
from tests.unit.tokenize.small_tokenizers import byte_level


def registered(folder: Path, vocab_size: int = 300) -> dict[str, Any]:
    """As a head of this folder registers it."""
    return model_row(
        folder, name="m", fingerprint="f", context_length=64, vocab_size=vocab_size, eos_ids=()
    )


def row_of(folder: Path, tokenizer_config: dict[str, Any], vocab_size: int = 300) -> dict[str, Any]:
    """The same with a small tokenizer and this configuration."""
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return registered(folder, vocab_size)


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


def entry(content: str, **flags: bool) -> dict[str, Any]:
    """A token as tokenizer.json lists it, of the id behind those of `byte_level`."""
    plain = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized", "special"], False)
    return {"id": 260, "content": content, **plain, **flags}


ADDED = {"added_tokens_decoder": {"260": entry("<x>", lstrip=True, rstrip=True, special=True)}}
FULL = {"__type": "AddedToken", **entry("<x>", lstrip=True)}
SPECIAL_MAP = "special_tokens_map.json"


@pytest.mark.parametrize(
    ("config", "files", "own"),
    [
        ({"eos_token": "<x>", "pad_token": "<y>"}, {}, []),
        ({"eos_token": FULL, "image_token": "<y>"}, {}, []),
        ({"additional_special_tokens": ["<y>", "<x>"], "eos_token": "<x>"}, {}, []),
        ({"extra_special_tokens": ["<x>"], "additional_special_tokens": ["<y>"]}, {}, []),
        ({"extra_special_tokens": {"image_token": "<x>", "eoi_token": "<y>"}}, {}, []),
        ({"eos_token": "<y>"}, {SPECIAL_MAP: {"eos_token": "<x>", "bos_token": None}}, []),
        ({"eos_token": "<y>"}, {SPECIAL_MAP: {"extra_special_tokens": ["<x>"]}}, []),
        ({}, {SPECIAL_MAP: {"additional_special_tokens": ["<x>", "<y>"]}}, []),
        ({"eos_token": "<y>"}, {"added_tokens.json": {"<y>": 261, "<x>": 260}}, []),
        (ADDED, {SPECIAL_MAP: {"eos_token": "<y>"}}, []),
        (ADDED, {}, [entry("<x>")]),
        (ADDED | {"eos_token": "<y>"}, {}, [entry("<x>", special=True)]),
        ({"eos_token": "<x>"}, {}, [entry("<x>")]),
        ({"additional_special_tokens": ["<x>"]}, {}, [entry("<x>")]),
        ({"added_tokens_decoder": {"260": entry("<x>")}}, {}, [entry("<x>", special=True)]),
        ({"eos_token": "hello"}, {}, []),
    ],
)
def test_tokens_of_all_files_are_those_that_transformers_reads(
    config: dict[str, Any], files: dict[str, Any], own: list[Any], tmp_path: Path
) -> None:
    document = json.loads(byte_level().to_str())
    document["added_tokens"] += own
    document["model"]["vocab"]["hello"] = document["model"]["vocab"].pop("Ġhello")
    fields = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    named = {"tokenizer.json": document, "tokenizer_config.json": fields, **files}
    for name, content in named.items():
        (tmp_path / name).write_text(json.dumps(content))
    tokens = Tokens.from_row(registered(tmp_path))
    reference = AutoTokenizer.from_pretrained(tmp_path)
    text = "a <x> b<y>c hello!"

    ids = tokens.prepare(prompt=text, params=SamplingParams()).prompt_ids

    assert list(ids) == reference(text)["input_ids"]
    assert tokens.completion(SamplingParams(), 60, ()).say(ids) == reference.decode(
        list(ids), skip_special_tokens=True
    )


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"extra_special_tokens": {"image_token": "<i>", "eot_token": "<e>"}}, {}),
        ({"eot_token": "<e>", "bos_token": "<b>"}, {}),
        ({"bos_token": None}, {SPECIAL_MAP: {"bos_token": "<b>"}}),
        ({"bos_token": "<c>"}, {SPECIAL_MAP: {"bos_token": {"content": "<b>"}}}),
        ({"bos_token": "<c>", **ADDED}, {SPECIAL_MAP: {"bos_token": "<b>"}}),
    ],
)
def test_a_template_has_the_tokens_that_transformers_names(
    config: dict[str, Any], files: dict[str, Any], tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    template = "{{ bos_token }}{{ image_token }}{{ messages[0].content }}{{ eot_token }}"
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    tokens = tokens_of(tmp_path, fields | config)

    text = tokens.chat.render([Message(role="user", content="a")], SamplingParams(), limit_chars=64)

    reference = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "a"}]
    assert text == reference.apply_chat_template(messages, tokenize=False)


def test_a_named_token_beyond_the_vocabulary_stays_text(tmp_path: Path) -> None:
    row = row_of(tmp_path, {"eos_token": "<x>", "pad_token": "<y>"}, vocab_size=261)

    known = Tokens.from_row(row).tokenizer.get_vocab()

    assert (known.get("<x>"), known.get("<y>")) == (260, None)
    assert tokenizers_eos_id(tmp_path) is None


@pytest.mark.parametrize("listed", [["<x>"], {"<x>": "a"}, {"<x>": None}])
def test_malformed_ids_of_added_tokens_name_their_file(listed: Any, tmp_path: Path) -> None:
    (tmp_path / "added_tokens.json").write_text(json.dumps(listed))

    with pytest.raises(Invalid, match=r"added_tokens\.json is "):
        tokens_of(tmp_path, {})


@pytest.mark.parametrize("listed", [["<tool>"], {"a": {"content": "x"}}, {"260": "x"}, {"260": {}}])
def test_malformed_added_tokens_name_their_file(listed: Any, tmp_path: Path) -> None:
    with pytest.raises(
        Invalid, match=r"added_tokens_decoder in tokenizer_config\.json is malformed"
    ):
        tokens_of(tmp_path, {"added_tokens_decoder": listed})


@pytest.mark.parametrize("name", ["chat_template.jinja", "special_tokens_map.json"])
@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_a_file_in_another_encoding_is_refused_by_name(
    name: str, encoding: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text('{"x": "é"}', encoding=encoding)

    with pytest.raises(Invalid, match=f"{name} is not UTF-8.*Save it as UTF-8"):
        row_of(tmp_path, {})


def test_a_list_of_templates_without_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="chat_template in the model's files is a list"):
        row_of(tmp_path, {"chat_template": ["x"]})


USUAL = "\n  {% for m in messages %}\n<{{ m.role }}>{{ m.content }}\n{% endfor %}\n  \n"
WITH_TOOLS = "\n  T{{ tools[0].function.name }}" + USUAL
NAMED = {"default": USUAL, "tool_use": WITH_TOOLS}
LISTED = [{"name": name, "template": template} for name, template in NAMED.items()]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize(
    ("template", "files"),
    [
        (LISTED, {}),
        (NAMED, {}),
        ("x", {"chat_template": USUAL, "additional_chat_templates/tool_use": WITH_TOOLS}),
        ("x", {f"additional_chat_templates/{name}": text for name, text in NAMED.items()}),
    ],
)
def test_named_templates_are_chosen_by_tools_as_in_transformers(
    template: Any, files: dict[str, str], tools: Any, tmp_path: Path
) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    for name, content in files.items():
        (tmp_path / f"{name}.jinja").write_text(content)
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    source = row_of(tmp_path, fields)["chat_template"]
    messages = [{"role": "user", "content": "a"}]

    text = ChatTemplate(source, {}).render(
        messages, tools=tools or (), limit_chars=999, add_generation_prompt=False
    )

    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert text == reference.apply_chat_template(messages, tools=tools, tokenize=False)


def test_calls_without_tools_are_text_in_the_usual_template(tmp_path: Path) -> None:
    """It knows no calls, though the template for tools does."""
    calls = "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson }}{% endfor %}"
    usual = "{% for m in messages %}{{ m.content }}{% endfor %}"
    named = {"default": usual, "tool_use": "{{ tools | tojson }}" + calls}
    function = {"name": "look_up", "arguments": "{}"}
    call = {"id": "call00001", "type": "function", "function": function}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    source = row_of(tmp_path, {"chat_template": named})["chat_template"]

    text = ChatTemplate(source, {}).render(messages, limit_chars=999)

    assert "look_up" in str(text)


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
