"""Texts/s of an encoder's bare engine beside sentence-transformers, in turns on the same cores.

    pip install --target LIB --no-deps sentence-transformers scipy scikit-learn joblib \
        threadpoolctl cloudpickle narwhals
    PYTHONPATH=LIB python -m tests.benchmarks.encoders --model DIR [--texts 1000]

Both get the same texts and tokenize them. The peer gets its best case: all texts at once, which it
sorts by length, so that batches have little padding, and the best of several batch sizes. The
engine gets them as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from services.stage.device.acquire import acquire
from services.stage.device.device import Device
from services.stage.engine.executor import Executor
from services.stage.engine.memory import Limits
from services.stage.model.model_info import ModelInfo
from shardline.contract.job import ALL_THAT_FIT, SamplingParams
from shardline_server.tokenize.tokens import Tokens
from tests.encoders import pool

SEATS = 64
BUDGET = 1024
KV_BYTES = 512 << 20
TARGET = 1.5
"""Times the peer's texts/s."""

Vectors = Sequence[np.ndarray[Any, Any]]
Embed = Callable[[Sequence[str]], Vectors]


def main() -> None:
    """Prints texts/s of each run, the ratio, and the least cosine of both, as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    info = replace(ModelInfo.read(options.model), context_length=options.longest)
    tokens = Tokens.from_row(info.row(name="encoder", fingerprint=""))
    texts = drawn(options.texts, options.longest, tokens)
    with tempfile.TemporaryDirectory() as folder:
        engine, device = loaded(info, options.dtype, options.threads, Path(folder))
        peer = import_module("sentence_transformers").SentenceTransformer(
            str(options.model), device="cpu", model_kwargs={"dtype": options.dtype}
        )
        peer.max_seq_length = options.longest
        ways: dict[str, Embed] = {"engine": partial(embedded, engine, tokens)}
        for size in options.batches:
            ways[f"batches_of_{size}"] = partial(peer.encode, batch_size=size)
        embedded(engine, tokens, texts[:SEATS])
        rates: dict[str, list[float]] = {name: [] for name in ways}
        found: dict[str, Vectors] = {}
        for _ in range(options.runs):
            for name, embed in ways.items():
                began_s = time.perf_counter()
                found[name] = embed(texts)
                rates[name].append(round(len(texts) / (time.perf_counter() - began_s), 1))
        device.release()
    ours, *theirs = ways
    best = max(theirs, key=lambda name: median(rates[name]))
    report = {
        "model": options.model.name,
        "dtype": options.dtype,
        "threads": options.threads,
        "least_cosine": min(map(cosine, found[ours], found[best])),
        "best": best,
        "ratio": round(median(rates[ours]) / median(rates[best]), 2),
        "target": TARGET,
        "texts_per_s": rates,
    }
    print(json.dumps(report))


def loaded(info: ModelInfo, dtype: str, num_threads: int, folder: Path) -> tuple[Executor, Device]:
    """Loads all layers onto the first cores, which are shared with the peer."""
    last = num_threads - 1
    device = acquire(
        f"cpu:0-{last}" if last else "cpu:0", worker="encoders", lock_folder=folder, shared=True
    )
    device.enter_thread()
    engine = Executor.load(
        model=info,
        layers=range(info.num_layers),
        device=device,
        dtype=dtype,
        limits=Limits(
            kv_bytes=KV_BYTES,
            token_budget=max(BUDGET, info.context_length),
            max_open=2 * SEATS,
        ),
        cache_folder=folder,
    )
    return engine, device


def drawn(num: int, longest: int, tokens: Tokens) -> list[str]:
    """Texts of 1 to `longest` tokens with the special ones, evenly, the same every time; each ends
    behind a word, so that few are shorter than drawn."""
    generator = random.Random(5)
    tokenizer = tokens.tokenizer
    assert tokenizer is not None, "an encoder has one"
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha())
    lengths = (1 + place * longest // num for place in range(num))
    texts = [" ".join(generator.choices(words, k=length)) for length in lengths]
    generator.shuffle(texts)
    return texts


def ids(tokens: Tokens, text: str) -> tuple[int, ...]:
    """Returns those of a text, cut to what fits."""
    params = SamplingParams(truncate_prompt_tokens=ALL_THAT_FIT)
    return tokens.prepare(prompt=text, params=params).prompt_ids


def embedded(engine: Executor, tokens: Tokens, texts: Sequence[str]) -> Vectors:
    """Returns the vectors of texts, tokenized as a door does."""
    return pool([engine], [ids(tokens, text) for text in texts], seats=SEATS)


def cosine(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """Returns the cosine of two vectors, whatever their lengths."""
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


if __name__ == "__main__":
    main()
