"""The trial of a model's miniature: what a split or a packed batch would leave out is seen, and
refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.masking_utils import create_causal_mask
from transformers.models.llama import modeling_llama
from transformers.models.ministral3 import modeling_ministral3

from services.stage.engine import split_trial
from services.stage.engine.split_trial import check_split
from shardline.base.errors import Invalid
from tests.models import CONFIGS

Patch = Callable[[pytest.MonkeyPatch], None]


def mixes_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token's MLP sees the token before it: state that no KV holds."""
    original = modeling_llama.LlamaMLP.forward

    def shifted(self: Any, x: Tensor) -> Any:
        return original(self, x + x.roll(1, dims=1))

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", shifted)


def counts_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions are those of the batch, whatever is asked."""
    original = modeling_llama.LlamaRotaryEmbedding.forward

    def counting(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        return original(self, x, torch.arange(position_ids.shape[1])[None])

    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", counting)


def attends_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no mask."""
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **_: None)


def biases_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask says more than who sees whom, as ALiBi's does."""

    def biased(**options: Any) -> Any:
        mask: Any = create_causal_mask(**options)
        return None if mask is None else mask + 0.1 * torch.arange(mask.shape[-1])

    monkeypatch.setattr(modeling_llama, "create_causal_mask", biased)


@pytest.fixture
def llama() -> Any:
    """Its config."""
    return CONFIGS["llama"]()


@pytest.mark.parametrize(
    "patch", [mixes_tokens, counts_positions, attends_both_ways, biases_scores]
)
def test_a_model_that_stages_would_compute_otherwise_is_refused(
    patch: Patch, llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch)

    with pytest.raises(Invalid, match="'llama' computes something else in stages than whole"):
        check_split(llama, tmp_path)


def test_a_model_that_counts_late_positions_itself_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = modeling_ministral3.get_llama_4_attn_scale
    config = CONFIGS["ministral3"]()
    config.rope_parameters = {**config.rope_parameters, "original_max_position_embeddings": 16_384}
    check_split(config, tmp_path / "before")

    def counting(position_ids: Tensor, *of_config: Any) -> Tensor:
        return original(torch.arange(position_ids.shape[1])[None], *of_config)

    monkeypatch.setattr(modeling_ministral3, "get_llama_4_attn_scale", counting)
    with pytest.raises(Invalid, match="'ministral3' computes something else in stages than whole"):
        check_split(config, tmp_path / "after")


def test_a_model_whose_code_raises_in_stages_is_refused_with_its_words(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(_: Any, x: Tensor) -> Tensor:
        raise TypeError("two sequences are too many")

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)

    with pytest.raises(
        Invalid, match="'llama' does not run in stages: TypeError: two sequences are too many"
    ):
        check_split(llama, tmp_path)


def test_a_model_that_passed_is_not_tried_again(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_split(llama, tmp_path)
    mixes_tokens(monkeypatch)
    check_split(llama, tmp_path)

    moved = copy.deepcopy(llama)
    moved._name_or_path = "/elsewhere"
    moved.architectures = ["LlamaForCausalLM"]
    check_split(moved, tmp_path)

    other = CONFIGS["llama"]()
    other.hidden_act = "gelu"
    with pytest.raises(Invalid, match="something else"):
        check_split(other, tmp_path)

    monkeypatch.setattr(split_trial, "VERSION", split_trial.VERSION + 1)
    with pytest.raises(Invalid, match="something else"):
        check_split(llama, tmp_path)


@pytest.mark.parametrize("name", ["JambaConfig", "RecurrentGemmaConfig"])
def test_a_state_of_an_unknown_kind_is_refused_by_name(name: str, tmp_path: Path) -> None:
    config = getattr(transformers, name)()

    with pytest.raises(Invalid, match="(?i)" + config.model_type.replace("_", "_?")):
        check_split(config, tmp_path)
