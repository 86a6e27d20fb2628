"""Given clerk's training code, then packed rows teach what single ones would, and a stopped run
goes on the same."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from services.standalone.demo.clerk.batches import IGNORED, pack
from services.standalone.demo.clerk.evaluate import Clerk
from services.standalone.demo.clerk.model import build_model
from services.standalone.demo.clerk.tasks import examples
from services.standalone.demo.clerk.tokenizer import build_tokenizer
from services.standalone.demo.clerk.train import (
    Trainer,
    TrainingPlan,
    load_checkpoint,
    save_checkpoint,
    train,
)

_ROW_TOKENS = 96


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(f"{example.prompt}{example.answer}" for example in examples(0, 2000))


def _plan(folder: Path) -> TrainingPlan:
    return TrainingPlan(out=folder, num_steps=10, limit_s=600.0, batch_examples=6)


def test_a_row_holds_whole_examples_and_labels_only_answers(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    drawn = examples(0, 30)
    batch = pack(tokenizer, drawn, _ROW_TOKENS)
    assert batch.ids.shape == batch.positions.shape == batch.labels.shape
    labels = [label for label in batch.labels.flatten().tolist() if label != IGNORED]
    said = str(tokenizer.decode(labels)).split(str(tokenizer.eos_token))
    assert sorted(said[:-1]) == sorted(example.answer for example in drawn)


def test_an_example_longer_than_a_row_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="row_tokens is 8: make it larger"):
        pack(tokenizer, examples(0, 6), 8)


def test_a_packed_example_sees_nothing_of_its_neighbors(tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    model = build_model(tokenizer)
    batch = pack(tokenizer, examples(0, 30), _ROW_TOKENS)
    row = int((batch.positions == 0).sum(dim=1).argmax())
    _, start, end, *_ = (batch.positions[row] == 0).nonzero().flatten().tolist()
    with torch.inference_mode():
        packed = model.model(
            batch.ids, position_ids=batch.positions, use_cache=False
        ).last_hidden_state
        alone = model.model(batch.ids[row : row + 1, start:end], use_cache=False).last_hidden_state
    torch.testing.assert_close(packed[row, start:end], alone[0], atol=1e-5, rtol=1e-5)


def test_a_run_that_goes_on_from_a_checkpoint_ends_as_an_undisturbed_one(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    undisturbed = Trainer(_plan(tmp_path), tokenizer)
    undisturbed.train_step()
    save_checkpoint(undisturbed, tmp_path / "checkpoint.safetensors")
    resumed = Trainer(_plan(tmp_path), tokenizer)
    load_checkpoint(resumed, tmp_path / "checkpoint.safetensors")
    assert resumed.step == 1
    assert undisturbed.train_step() == resumed.train_step()
    assert undisturbed.train_step() == resumed.train_step()


def test_a_whole_run_leaves_a_model_that_answers_and_no_checkpoint(tmp_path: Path) -> None:
    train(TrainingPlan(out=tmp_path, num_steps=1, limit_s=600.0, batch_examples=6))
    assert not (tmp_path / "checkpoint.safetensors").exists()
    assert len(Clerk(tmp_path, "bfloat16").answer(["words: 12 ="])) == 1


def test_a_run_that_goes_on_keeps_the_tokenizer_it_began_with(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    save_checkpoint(Trainer(_plan(tmp_path), tokenizer), tmp_path / "checkpoint.safetensors")
    train(TrainingPlan(out=tmp_path, num_steps=1, limit_s=600.0, batch_examples=6))
    kept = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert kept.get_vocab() == tokenizer.get_vocab()
