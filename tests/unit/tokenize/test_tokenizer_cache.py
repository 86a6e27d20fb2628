"""The cache of tokenizers: what is loaded, what a refresh drops, and the limit that pipelines
set."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from shardline.base.errors import UnknownModel
from shardline_server.tokenize import RegisteredModel, TokenizerCache


def row(name: str, fingerprint: str) -> dict[str, Any]:
    """A model without a tokenizer, as its row of `models`."""
    return {
        "name": name,
        "fingerprint": fingerprint,
        "tokenizer": "",
        "chat_template": None,
        "special_tokens": {},
        "context_length": 100,
        "vocab_size": 10,
        "eos_token_ids": [1],
        "updated_at": datetime.now(UTC),
    }


@pytest.fixture
def cache() -> TokenizerCache:
    """Two registered models, of which one is loaded."""
    cache = TokenizerCache()
    cache.refresh({"a": "1", "b": "1"}, {"a": 40}, {"a": {"legal": "2"}})
    cache.add(RegisteredModel.from_row(row("a", "1")))
    return cache


def test_a_model_that_is_not_loaded_yet_is_lacking(cache: TokenizerCache) -> None:
    assert (cache.has("a"), cache.lacks("a")) == (True, False)
    assert (cache.has("b"), cache.lacks("b")) == (False, True)
    assert (cache.has("c"), cache.lacks("c")) == (False, False)


def test_pipelines_with_little_kv_set_the_limit(cache: TokenizerCache) -> None:
    assert cache.get("a").tokens.longest == 40
    cache.refresh({"a": "1"}, {}, {})
    assert cache.get("a").tokens.longest == 100


def test_a_model_with_another_fingerprint_is_loaded_again(cache: TokenizerCache) -> None:
    cache.refresh({"a": "2"}, {}, {})
    assert cache.lacks("a")
    cache.add(RegisteredModel.from_row(row("a", "2")))
    assert cache.get("a").fingerprint == "2"


def test_a_model_that_is_gone_is_refused_with_the_registered_ones(cache: TokenizerCache) -> None:
    cache.refresh({"b": "1"}, {}, {})
    with pytest.raises(UnknownModel, match="b"):
        cache.get("a")


def test_an_adapter_is_named_behind_its_model(cache: TokenizerCache) -> None:
    found = cache.get("a:legal")

    assert (found.name, found.adapter, found.adapter_fingerprint, found.address) == (
        "a",
        "legal",
        "2",
        "a:legal",
    )
    assert (cache.has("a:legal"), cache.has("a:other")) == (True, False)
    with pytest.raises(UnknownModel, match="Use one of: a, a:legal, b"):
        cache.get("a:other")


def test_a_model_whose_name_has_a_colon_comes_before_an_adapter(cache: TokenizerCache) -> None:
    cache.refresh({"a": "1", "a:legal": "3"}, {}, {"a": {"legal": "2"}})
    cache.add(RegisteredModel.from_row(row("a:legal", "3")))

    assert (cache.get("a:legal").name, cache.get("a:legal").adapter) == ("a:legal", None)
