"""Tiny random encoders on disk, with sentence-transformers' files, and chains of stages that pool.
Knows no test."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers as tf
from safetensors.torch import save_file
from tokenizers import Tokenizer, processors
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from services.stage.engine.executor import Executor
from shardline.contract.job import SamplingParams
from shardline_scheduler.events import SequenceFinished
from shardline_scheduler.scheduler import Scheduler
from shardline_scheduler.scheduler_config import SchedulerConfig
from shardline_scheduler.sequence import Request
from shardline_scheduler.step_plan import StepPlan
from tests.chain import Chain, CountingSink
from tests.models import COMMON, HEADS_ALIKE, VOCAB_SIZE, save_drawn
from tests.models import CONFIGS as DECODERS

CLS, SEPARATOR = 3, 4
WINDOW = 24
SHARED: dict[str, Any] = {**HEADS_ALIKE, "max_position_embeddings": 140}
CONFIGS: dict[str, Callable[[], Any]] = {
    "bert": lambda: tf.BertConfig(**SHARED),
    "roberta": lambda: tf.RobertaConfig(**SHARED, type_vocab_size=1),
    "xlm-roberta": lambda: tf.XLMRobertaConfig(**SHARED, type_vocab_size=1),
    "mpnet": lambda: tf.MPNetConfig(**SHARED),
    "electra": lambda: tf.ElectraConfig(**SHARED, embedding_size=32),
    "distilbert": lambda: tf.DistilBertConfig(
        vocab_size=VOCAB_SIZE,
        dim=32,
        hidden_dim=48,
        n_layers=4,
        n_heads=4,
        max_position_embeddings=140,
        pad_token_id=0,
    ),
    "modernbert": lambda: tf.ModernBertConfig(
        **SHARED,
        local_attention=WINDOW,
        layer_types=["full_attention", "sliding_attention"] * 2,
        cls_token_id=CLS,
        sep_token_id=SEPARATOR,
    ),
    "nomic_bert": lambda: tf.NomicBertConfig(**SHARED),
    "gte": lambda: tf.GteConfig(**SHARED, type_vocab_size=1),
    "jina_embeddings_v3": lambda: tf.JinaEmbeddingsV3Config(**SHARED, type_vocab_size=1),
    "qwen3": lambda: tf.Qwen3Config(**COMMON, head_dim=16),
    "gemma3_text": lambda: tf.Gemma3TextConfig(
        **COMMON,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        use_bidirectional_attention=True,
    ),
}
POOLED: Final = {"qwen3": "lasttoken"}
"""Families of decoders by their usual pooling; all others by the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseModules:
    """Those that stand behind a checkpoint's pooling."""

    sizes: tuple[int, ...]
    """The numbers that go into each, and those that leave the last."""
    activation: str = "linear.Identity"
    """In torch.nn.modules."""
    bias: bool = False


def save_encoder(folder: Path, name: str, *, normalizes: bool = True, longest: int = 128) -> Path:
    """An encoder that embeds, in its folder; only the first time."""
    path = folder / f"{name}-embeds"
    if path.is_dir():
        return path
    save_drawn(path, lambda: tf.AutoModel.from_config(CONFIGS[name]()))
    mode = POOLED.get(name, "mean_tokens")
    save_modules(path, mode=mode, normalizes=normalizes, longest=longest)
    return save_words(path)


def save_modules(
    path: Path, *, mode: str = "mean_tokens", normalizes: bool = True, longest: int
) -> None:
    """Adds what sentence-transformers has beside a model."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    modules = [
        {"idx": at, "name": str(at), "path": f"{at}_{kind}" if at else "",
         "type": f"sentence_transformers.models.{kind}"}
        for at, kind in enumerate(kinds)
    ]  # fmt: skip
    _write(path / "modules.json", modules)
    _write(path / "1_Pooling/config.json", {f"pooling_mode_{mode}": True})
    _write(path / "sentence_bert_config.json", {"max_seq_length": longest})
    _write(
        path / "config_sentence_transformers.json",
        {"prompts": {"query": "w7 w8 ", "document": ""}, "default_prompt_name": None},
    )


def save_dense(path: Path, modules: DenseModules) -> Path:
    """Puts Dense modules behind the pooling of an encoder in its folder."""
    file = path / "modules.json"
    pooling, rest = json.loads(file.read_text())[:2], json.loads(file.read_text())[2:]
    generator = torch.Generator().manual_seed(9)
    for place, (num_in, num_out) in enumerate(pairwise(modules.sizes), 2):
        name = f"{place}_Dense"
        pooling.append({"path": name, "type": "sentence_transformers.models.Dense"})
        settings = {
            "in_features": num_in,
            "out_features": num_out,
            "bias": modules.bias,
            "activation_function": f"torch.nn.modules.{modules.activation}",
        }
        _write(path / name / "config.json", settings)
        tensors = {"linear.weight": torch.randn(num_out, num_in, generator=generator)}
        if modules.bias:
            tensors["linear.bias"] = torch.randn(num_out, generator=generator)
        save_file(tensors, path / name / "model.safetensors")
    _write(file, pooling + rest)
    return path


def save_cross_encoder(folder: Path, name: str) -> Path:
    """A cross-encoder with scores that are shares of 1; only the first time."""
    path = folder / f"{name}-scores"
    if path.is_dir():
        return path

    def make() -> Any:
        config = {**DECODERS, **CONFIGS}[name]()
        config.num_labels = 1
        return tf.AutoModelForSequenceClassification.from_config(config)

    return save_words(save_drawn(path, make))


def save_words(path: Path) -> Path:
    """Adds a tokenizer of words w0, w1 and so on, that marks texts as BERT's does."""
    special = {"[PAD]": 0, "[UNK]": 1, "[CLS]": CLS, "[SEP]": SEPARATOR}
    words = {f"w{number}": number for number in range(5, VOCAB_SIZE)}
    tokenizer = Tokenizer(WordLevel({**special, "[x]": 2, **words}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(list(special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEPARATOR)],
    )
    tokenizer.save(str(path / "tokenizer.json"))
    _write(path / "tokenizer_config.json", {"sep_token": "[SEP]", "cls_token": "[CLS]"})
    return path


def pool(
    stages: Sequence[Executor],
    texts: Sequence[Sequence[int]],
    *,
    seats: int = 32,
    dimensions: int | None = None,
) -> list[np.ndarray[Any, Any]]:
    """The vectors, float32, of texts that run together, in their order."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=min(stage.num_blocks for stage in stages),
            max_seats=seats,
            token_budget=stages[0].token_budget,
            num_lanes=len(stages),
            max_len=stages[0].info.context_length,
            prefix_cache=False,
            pools=True,
        )
    )
    chain = Chain(stages)
    for stage in stages:
        stage.reset()
    params = SamplingParams(max_tokens=1, dimensions=dimensions)
    for place, ids in enumerate(texts):
        request = Request(key=(str(place), 1), prompt_ids=tuple(ids), params=params, seed=0)
        assert not scheduler.add(request, CountingSink(1)), "it ended before it began"
    found: dict[str, bytes] = {}
    in_flight: deque[StepPlan] = deque()
    while not scheduler.idle:
        while (plan := scheduler.schedule()) is not None:
            in_flight.append(plan)
        for event in scheduler.apply(chain.run(in_flight.popleft())):
            assert isinstance(event, SequenceFinished), event
            found[event.key[0]] = event.vector
    assert [stage.blocks_used for stage in stages] == [0] * len(stages)
    return [np.frombuffer(found[str(place)], "<f4") for place in range(len(texts))]


def drawn_texts(lengths: Sequence[int]) -> list[list[int]]:
    """Random token ids, the same every time, without special ones."""
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(5, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths
    ]


def _write(file: Path, document: object) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(document))
