"""Vectors and scores of packed texts, in one stage and in two: those of transformers, one text at a
time, and each with its own bits whatever runs beside it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

from services.stage.device.device import Device
from tests.chain import load_chain
from tests.encoders import (
    CLS,
    CONFIGS,
    POOLED,
    SEPARATOR,
    DenseModules,
    drawn_texts,
    pool,
    save_cross_encoder,
    save_dense,
)
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
        assert cosine(first, expected(model, text, is_decoder=name in POOLED)) >= LEAST_COSINE


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("gemma3_text", DenseModules(sizes=(32, 96, 32))),
        ("bert", DenseModules(sizes=(32, 48), activation="activation.Tanh", bias=True)),
    ],
)
def test_a_vector_goes_through_dense_modules(
    name: str, modules: DenseModules, model_folder: Path, device: Device, tmp_path: Path
) -> None:
    path = shutil.copytree(save(model_folder, name), tmp_path / "model")
    save_dense(path, modules)
    texts = drawn_texts(LENGTHS)
    whole = load_chain(path, 1, device, tmp_path)
    together = pool(whole, texts)
    alone = [pool(whole, [text])[0] for text in texts]
    split = pool(load_chain(path, 2, device, tmp_path), texts, dimensions=modules.sizes[-1])

    model = tf.AutoModel.from_pretrained(path).eval()
    for text, one, other, third in zip(texts, together, alone, split, strict=True):
        assert np.array_equal(one, other)
        assert np.array_equal(one, third)
        wanted = projected(path, modules, pooled(model, text))
        assert np.abs(one - wanted).max() <= MOST_WRONG


def test_a_vector_is_cut_behind_its_dense_modules(
    model_folder: Path, device: Device, tmp_path: Path
) -> None:
    path = shutil.copytree(save(model_folder, "gemma3_text"), tmp_path / "model")
    modules = DenseModules(sizes=(32, 96, 32))
    stages = load_chain(save_dense(path, modules), 1, device, tmp_path)
    texts = drawn_texts((9, 100))
    for whole, cut in zip(pool(stages, texts), pool(stages, texts, dimensions=CUT), strict=True):
        assert np.linalg.norm(cut) == pytest.approx(1, abs=MOST_WRONG)
        assert cosine(whole[:CUT], cut) >= LEAST_COSINE


@torch.inference_mode()
def pooled(model: Any, ids: list[int]) -> torch.Tensor:
    """The mean of a text's hidden states, [H]."""
    states: torch.Tensor = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return states.mean(0)


def projected(path: Path, modules: DenseModules, vector: torch.Tensor) -> np.ndarray[Any, Any]:
    """A pooled vector behind these modules, normalized, by torch alone."""
    for place in range(2, len(modules.sizes) + 1):
        stored = load_file(path / f"{place}_Dense/model.safetensors")
        vector = stored["linear.weight"] @ vector + stored.get("linear.bias", 0)
        if modules.activation.endswith("Tanh"):
            vector = vector.tanh()
    found: np.ndarray[Any, Any] = (vector / vector.norm()).numpy()
    return found


@pytest.mark.parametrize(
    "name",
    [
        *("bert", "roberta", "mpnet", "distilbert", "modernbert"),
        *("qwen3", "llama", "gemma2", "gemma3_text"),
    ],
)
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
