"""What a request to an encoder becomes: ids within the model's limit, or an error that names the
field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardline.base.errors import ContextExceeded, Invalid
from shardline.contract.encoders.encoder import Encoder, EncoderTask
from shardline.contract.job import SamplingParams
from shardline_server.tokenize import Tokens
from shardline_server.tokenize.encoders.encoder_texts import check_task
from tests.encoders import CLS, SEPARATOR, save_words
from tests.models import VOCAB_SIZE

LONGEST = 8


def tokens(folder: Path, **fields: Any) -> Tokens:
    """An encoder's, with a limit of LONGEST."""
    found = Tokens(
        model="m",
        tokenizer_json=(save_words(folder) / "tokenizer.json").read_text(),
        chat_template=None,
        special_tokens={},
        context_length=LONGEST,
        vocab_size=VOCAB_SIZE,
        eos_ids=(),
    )
    found.encoder = Encoder(**{"task": EncoderTask.EMBED, "num_dimensions": 32, **fields})
    return found


def scorer(folder: Path) -> Tokens:
    return tokens(folder, task=EncoderTask.SCORE, num_dimensions=1, separator=SEPARATOR)


def ids(known: Tokens, prompt: Any, **fields: Any) -> tuple[int, ...]:
    return known.prepare(prompt=prompt, params=SamplingParams(**fields)).prompt_ids


def test_a_text_gets_special_tokens_and_its_prompt(tmp_path: Path) -> None:
    known = tokens(tmp_path, prompts={"query": "w7 "}, default_prompt=None)
    assert ids(known, "w9") == (CLS, 9, SEPARATOR)
    assert ids(known, "w9", prompt_name="query") == (CLS, 7, 9, SEPARATOR)
    assert ids(known, "w9", add_special_tokens=False) == (9,)
    by_default = tokens(tmp_path, prompts={"query": "w7 "}, default_prompt="query")
    assert ids(by_default, "w9") == (CLS, 7, 9, SEPARATOR)
    assert ids(tokens(tmp_path, lowercases=True), "W9") == (CLS, 9, SEPARATOR)


def test_a_text_that_is_too_long_is_refused_or_cut_as_asked(tmp_path: Path) -> None:
    known = tokens(tmp_path)
    text = "w10 w11 w12 w13 w14 w15 w16"
    with pytest.raises(ContextExceeded, match=r"^prompt: .* 8 tokens, and 9 tokens came"):
        ids(known, text)
    assert ids(known, text, truncate_prompt_tokens=-1) == (CLS, *range(10, 16), SEPARATOR)
    assert ids(known, text, truncate_prompt_tokens=4) == (CLS, 10, 11, SEPARATOR)
    assert ids(known, tuple(range(10, 20)), truncate_prompt_tokens=-1) == tuple(range(10, 18))
    with pytest.raises(ContextExceeded, match="prompt"):
        ids(known, "w10 " * 1000)
    assert len(ids(known, "w10 " * 1000, truncate_prompt_tokens=-1)) == LONGEST


def test_a_pair_is_cut_where_it_is_longer(tmp_path: Path) -> None:
    known = scorer(tmp_path)
    assert ids(known, "w10", document="w20") == (CLS, 10, SEPARATOR, 20, SEPARATOR)
    with pytest.raises(ContextExceeded, match=r"^document: "):
        ids(known, "w10", document="w20 w21 w22 w23 w24")
    cut = ids(known, "w10", document="w20 w21 w22 w23 w24", truncate_prompt_tokens=-1)
    assert cut == (CLS, 10, SEPARATOR, 20, 21, 22, 23, SEPARATOR)
    both = ids(known, "w10 w11 w12 w13", document="w20 w21 w22", truncate_prompt_tokens=-1)
    assert both == (CLS, 10, 11, 12, SEPARATOR, 20, 21, SEPARATOR)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"max_tokens": 7}, "max_tokens"),
        ({"document": "w9"}, "document"),
        ({"dimensions": 16}, "dimensions"),
        ({"dimensions": 33}, "dimensions"),
        ({"prompt_name": "query"}, "prompt_name"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_what_makes_no_sense_for_an_embedding_is_refused(
    tmp_path: Path, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(Invalid) as refused:
        ids(tokens(tmp_path), "w9", **fields)
    assert refused.value.field == field


def test_vectors_are_cut_only_where_the_model_was_trained_to(tmp_path: Path) -> None:
    assert ids(tokens(tmp_path, shorter=(8, 16)), "w9", dimensions=16)
    assert ids(tokens(tmp_path, any_shorter=True), "w9", dimensions=5)
    assert ids(tokens(tmp_path), "w9", dimensions=32)
    with pytest.raises(Invalid, match="Use 8, 16"):
        ids(tokens(tmp_path, shorter=(8, 16)), "w9", dimensions=12)


@pytest.mark.parametrize(
    ("prompt", "fields", "field"),
    [
        ("w9", {}, "document"),
        ((9, 10), {"document": "w9"}, "prompt"),
        ("w9 [SEP] w10", {"document": "w9"}, "prompt"),
        ("w9", {"document": "w9", "dimensions": 1}, "dimensions"),
    ],
)
def test_what_is_no_pair_is_refused(
    tmp_path: Path, prompt: Any, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(Invalid) as refused:
        ids(scorer(tmp_path), prompt, **fields)
    assert refused.value.field == field


def test_an_error_names_the_task_of_the_model(tmp_path: Path) -> None:
    known = tokens(tmp_path)
    with pytest.raises(Invalid, match=r"m makes embeddings .its task is embed., and is asked for"):
        check_task("m", known.encoder, None)
    with pytest.raises(Invalid, match=r"m generates text .its task is generate., and is asked for"):
        check_task("m", None, EncoderTask.EMBED)
    check_task("m", known.encoder, EncoderTask.EMBED)
