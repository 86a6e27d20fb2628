"""Given clerk's saved weights, then they are small, plain, and answer prompts that training never
saw."""

import json

import torch
from safetensors import safe_open

from services.standalone.demo.clerk.evaluate import Clerk, evaluate, table
from services.standalone.demo.clerk.model import FOLDER
from services.standalone.demo.clerk.tasks import TASKS, examples


def test_the_folder_fits_a_repository_and_holds_a_plain_llama_in_bfloat16() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_hidden_layers"] == 8
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 12 * 1024 * 1024
    with safe_open(FOLDER / "model.safetensors", framework="pt") as stored:
        assert {stored.get_tensor(name).dtype for name in list(stored.keys())} == {torch.bfloat16}


def test_generation_stops_by_itself_at_the_end_token() -> None:
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    tokenizer = json.loads((FOLDER / "tokenizer.json").read_text())
    ends = [token["id"] for token in tokenizer["added_tokens"] if token["content"] == "<eos>"]
    assert [generation["eos_token_id"]] == ends


def test_at_least_three_tasks_stay_and_unseen_prompts_are_answered_exactly() -> None:
    asked = examples(2024, 96, "unseen")
    scores = evaluate(Clerk(FOLDER, "float32"), asked)
    assert len(TASKS) >= 3
    assert sum(score.num_right for score in scores) >= 0.95 * len(asked), table(scores)
