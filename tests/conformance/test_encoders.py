"""Vectors and scores of packed texts, in one stage and in two: those of transformers, one text at a
time, and each with its own bits whatever runs beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from services.stage.device.device import Device
from tests.chain import load_chain
from tests.encoders import CLS, CONFIGS, SEPARATOR, drawn_texts, pool, save_cross_encoder
from tests.encoders import save_encoder as save

LENGTHS = (1, 2, 17, 63, 64, 65, 100, 128, 5, 31)
LEAST_COSINE = 0.99999
MOST_WRONG = 1e-5
CUT = 8


def cosine(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


@torch.inference_mode()
def expected(model: Any, ids: list[int], *, is_decoder: bool) -> np.ndarray[Any, Any]:
    states = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    vector = states[-1] if is_decoder else states.mean(0)
    found: np.ndarray[Any, Any] = torch.nn.functional.normalize(vector, dim=0).numpy()
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_a_text_has_the_vector_of_transformers_in_any_split_and_batch(
    name: str, model_folder: Path, device: Device, tmp_path: Path
) -> None:
    path = save(model_folder, name)
    texts = drawn_texts(LENGTHS)
    whole = load_chain(path, 1, device, tmp_path)
    together = pool(whole, texts)
    alone = [pool(whole, [text])[0] for text in texts]
    split = pool(load_chain(path, 2, device, tmp_path), texts, seats=3)

    assert whole[0].exact
    model = tf.AutoModel.from_pretrained(path).eval()
    for text, *found in zip(texts, together, alone, split, strict=True):
        first, *others = found
        assert all(np.array_equal(first, other) for other in others), f"{len(text)} tokens"
        assert cosine(first, expected(model, text, is_decoder=name == "qwen3")) >= LEAST_COSINE


@pytest.mark.parametrize("name", ["bert", "roberta", "mpnet", "distilbert", "modernbert"])
def test_a_pair_has_the_score_of_transformers(
    name: str, model_folder: Path, device: Device, tmp_path: Path
) -> None:
    path = save_cross_encoder(model_folder, name)
    halves = drawn_texts((3, 9, 1, 40, 17, 60))
    pairs = [
        [CLS, *query, SEPARATOR, *document, SEPARATOR]
        for query, document in zip(halves[::2], halves[1::2], strict=True)
    ]
    together = pool(load_chain(path, 2, device, tmp_path), pairs)
    alone = [pool(load_chain(path, 1, device, tmp_path), [pair])[0] for pair in pairs]

    model = tf.AutoModelForSequenceClassification.from_pretrained(path).eval()
    for pair, one, other, query in zip(pairs, together, alone, halves[::2], strict=True):
        given = {"input_ids": torch.tensor([pair])}
        if name == "bert":
            second = len(query) + 2
            given["token_type_ids"] = torch.tensor([[int(at >= second) for at in range(len(pair))]])
        with torch.inference_mode():
            score = model(**given).logits.sigmoid().item()
        assert np.array_equal(one, other)
        assert one == pytest.approx(score, abs=MOST_WRONG)


def test_a_vector_is_cut_before_it_is_normalized(
    model_folder: Path, device: Device, tmp_path: Path
) -> None:
    stages = load_chain(save(model_folder, "bert"), 1, device, tmp_path)
    texts = drawn_texts((9, 30))
    for whole, cut in zip(pool(stages, texts), pool(stages, texts, dimensions=CUT), strict=True):
        assert len(cut) == CUT
        assert np.linalg.norm(cut) == pytest.approx(1, abs=MOST_WRONG)
        assert cosine(whole[:CUT], cut) >= LEAST_COSINE
