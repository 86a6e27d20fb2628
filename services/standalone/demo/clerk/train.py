"""Owns the training of clerk from nothing: seeded, resumable, within an hour on two cores.

`python -m services.standalone.demo.clerk.train --out DIR`. Every step draws its own examples from
its number, so a run that goes on from a checkpoint sees what an undisturbed one would have seen.
"""

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from services.standalone.demo.clerk.batches import IGNORED, TrainingRows, pack
from services.standalone.demo.clerk.model import build_model, save_model
from services.standalone.demo.clerk.numerals import words
from services.standalone.demo.clerk.tasks import examples
from services.standalone.demo.clerk.tokenizer import build_tokenizer

_SEED: Final = 20
_TOKENIZER_EXAMPLES: Final = 40_000
_WARMUP_STEPS: Final = 40
_ROW_TOKENS: Final = 96
_MATRIX_RATE: Final = 5e-3
_REST_RATE: Final = 1.5e-3
_FLOOR: Final = 0.01  # of the rates, at the end of the cosine
# The hard tasks come more often: in equal shares, dates were right after 400 steps and orders not
# after 800.
_TURNS: Final = words("date words number number sum sum order order order sort sort sort")
_CHECKPOINT_STEPS: Final = 200
_PRINT_STEPS: Final = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """How long to train. The rates fall with whichever is further on, the steps or the minutes."""

    out: Path
    num_steps: int
    limit_s: float
    batch_examples: int


class Trainer:
    """The model, its two optimizers, and how far they are."""

    def __init__(self, plan: TrainingPlan, tokenizer: PreTrainedTokenizerFast) -> None:
        torch.manual_seed(_SEED)
        self.plan = plan
        self.tokenizer = tokenizer
        self.model: LlamaForCausalLM = build_model(tokenizer)
        matrices = [weight for weight in self.model.model.layers.parameters() if weight.ndim == 2]
        chosen = {id(weight) for weight in matrices}
        rest = [weight for weight in self.model.parameters() if id(weight) not in chosen]
        # Orthogonal updates learn these tasks in about half the steps that AdamW takes on all
        # weights.
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(
                matrices, lr=_MATRIX_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(rest, lr=_REST_RATE, weight_decay=0.0, betas=(0.9, 0.98)),
        )
        self.step = 0
        self.elapsed_s = 0.0

    @property
    def progress(self) -> float:
        return max(self.step / self.plan.num_steps, self.elapsed_s / self.plan.limit_s)

    def train_step(self) -> float:
        """One batch; the mean loss of a token of its answers."""
        started = time.monotonic()
        self._set_rates()
        drawn = examples(_SEED + self.step, self.plan.batch_examples, turns=_TURNS)
        loss = answer_loss(self.model, pack(self.tokenizer, drawn, _ROW_TOKENS))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.elapsed_s += time.monotonic() - started
        return loss.item()

    def _set_rates(self) -> None:
        cosine = _FLOOR + (1 - _FLOOR) * (1 + math.cos(math.pi * min(1.0, self.progress))) / 2
        factor = min(1.0, (self.step + 1) / _WARMUP_STEPS) * cosine
        for optimizer, rate in zip(self.optimizers, (_MATRIX_RATE, _REST_RATE), strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor


def answer_loss(model: LlamaForCausalLM, batch: TrainingRows) -> torch.Tensor:
    """Only places that predict an answer reach the output head."""
    wanted = batch.labels != IGNORED
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(
            batch.ids, position_ids=batch.positions, use_cache=False
        ).last_hidden_state
        logits = model.lm_head(hidden[wanted])
    return cross_entropy(logits.float(), batch.labels[wanted])


def save_checkpoint(trainer: Trainer, path: Path) -> None:
    """Weights and moments in one safetensors file, put in place whole."""
    tensors = {f"model.{name}": value.clone() for name, value in trainer.model.named_parameters()}
    for index, optimizer in enumerate(trainer.optimizers):
        for place, moments in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{place}.{key}": value for key, value in moments.items()}
    partial = path.with_suffix(".partial")
    save_file(
        tensors, partial, metadata={"step": str(trainer.step), "elapsed_s": str(trainer.elapsed_s)}
    )
    partial.replace(path)


def load_checkpoint(trainer: Trainer, path: Path) -> None:
    """Load what save_checkpoint wrote into a trainer of the same shape."""
    with safe_open(path, framework="pt") as stored:
        names = list(stored.keys())
        for name, weight in trainer.model.named_parameters():
            weight.data.copy_(stored.get_tensor(f"model.{name}"))
        for index, optimizer in enumerate(trainer.optimizers):
            state = optimizer.state_dict()
            moments: dict[int, dict[str, torch.Tensor]] = {}
            for name in names:
                if name.startswith(f"optimizer.{index}."):
                    _, _, place, key = name.split(".")
                    moments.setdefault(int(place), {})[key] = stored.get_tensor(name)
            optimizer.load_state_dict({**state, "state": moments})
        trainer.step = int(stored.metadata()["step"])
        trainer.elapsed_s = float(stored.metadata()["elapsed_s"])


def train(plan: TrainingPlan) -> None:
    """Go on from the folder's checkpoint, if it has one, to the end of the plan; leave the model in
    the folder."""
    plan.out.mkdir(parents=True, exist_ok=True)
    checkpoint = plan.out / "checkpoint.safetensors"
    resumes = checkpoint.exists()
    tokenizer = (
        PreTrainedTokenizerFast.from_pretrained(plan.out) if resumes else _new_tokenizer(plan.out)
    )
    trainer = Trainer(plan, tokenizer)
    if resumes:
        load_checkpoint(trainer, checkpoint)
    while trainer.progress < 1.0:
        loss = trainer.train_step()
        if trainer.step % _PRINT_STEPS == 0:
            print(
                f"step {trainer.step}  loss {loss:.4f}  {trainer.elapsed_s / 60:.1f} min",
                flush=True,
            )
        if trainer.step % _CHECKPOINT_STEPS == 0:
            save_checkpoint(trainer, checkpoint)
    save_model(trainer.model, tokenizer, plan.out)
    checkpoint.unlink(missing_ok=True)


def _new_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Saved at once: a run that goes on must read the ids it began with, even if the tasks' code
    has changed."""
    drawn = examples(_SEED, _TOKENIZER_EXAMPLES)
    tokenizer = build_tokenizer(f"{example.prompt}{example.answer}" for example in drawn)
    tokenizer.save_pretrained(folder)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the model and the checkpoint"
    )
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        help="the rates fall to the floor by then at the latest",
    )
    parser.add_argument("--batch", type=int, default=96, help="examples in one step")
    given = parser.parse_args()
    if given.steps < 1 or given.minutes <= 0 or given.batch < 1:
        parser.error("--steps, --minutes and --batch must be above 0")
    train(
        TrainingPlan(
            out=given.out,
            num_steps=given.steps,
            limit_s=given.minutes * 60,
            batch_examples=given.batch,
        )
    )


if __name__ == "__main__":
    main()
