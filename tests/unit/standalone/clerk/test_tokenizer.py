"""Given clerk's saved tokenizer, then every door that can read it sees the same ids, and chat
equals plain text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from services.standalone.demo.clerk.model import FOLDER
from services.standalone.demo.clerk.tasks import examples
from services.standalone.demo.clerk.tokenizer import build_tokenizer

_PLAIN = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
_HF = AutoTokenizer.from_pretrained(FOLDER)
_PROMPT = "date: 3rd of March 2024 ="


def _rendered(*messages: tuple[str, str], add_generation_prompt: bool = True) -> str:
    turns = [{"role": role, "content": content} for role, content in messages]
    text = _HF.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert isinstance(text, str)
    return text


def test_both_loaders_give_the_same_ids_with_the_begin_token_in_front() -> None:
    for example in examples(5, 60, "unseen"):
        ids = _PLAIN.encode(example.prompt).ids
        assert ids == _HF(example.prompt).input_ids
        assert ids[0] == _HF.bos_token_id


def test_each_digit_is_one_token() -> None:
    tokens = _PLAIN.encode("order 4096 of 12.3.2024", add_special_tokens=False).tokens
    assert "".join(token for token in tokens if any(map(str.isdigit, token))) == "40961232024"
    assert all(len(token) == 1 for token in tokens if any(map(str.isdigit, token)))


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=80))
def test_any_text_comes_back_from_its_ids(text: str) -> None:
    assert (
        _PLAIN.decode(_PLAIN.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
        == text
    )


def test_a_user_message_renders_to_the_plain_prompt() -> None:
    text = _rendered(("user", _PROMPT))
    assert _PLAIN.encode(text, add_special_tokens=False).ids == _PLAIN.encode(_PROMPT).ids


def test_the_generation_prompt_is_the_equals_sign_unless_it_was_typed() -> None:
    assert _rendered(("user", "words: 12")) == "<bos>words: 12 ="
    assert _rendered(("user", " words: 12 = ")) == "<bos>words: 12 ="
    assert _rendered(("user", "words: 12"), add_generation_prompt=False) == "<bos>words: 12"


def test_only_the_last_user_message_is_asked() -> None:
    text = _rendered(
        ("system", "Be brief."), ("user", "words: 1 ="), ("assistant", "one"), ("user", _PROMPT)
    )
    assert text == f"<bos>{_PROMPT}"


def test_a_finished_exchange_renders_as_it_was_trained() -> None:
    text = _rendered(("user", _PROMPT), ("assistant", "2024-03-03"), add_generation_prompt=False)
    assert text == f"<bos>{_PROMPT}2024-03-03<eos>"


def test_a_chat_without_a_user_message_is_refused() -> None:
    with pytest.raises(TemplateError, match="no user message"):
        _rendered(("system", "Be brief."))


def test_building_twice_gives_the_same_tokenizer() -> None:
    texts = [f"{example.prompt}{example.answer}" for example in examples(0, 600)]
    assert (
        build_tokenizer(texts).backend_tokenizer.to_str()
        == build_tokenizer(texts).backend_tokenizer.to_str()
    )
