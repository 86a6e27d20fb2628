"""Owns the proof: how many unseen prompts the saved model answers exactly, by task, with greedy
`generate`.

`python -m services.standalone.demo.clerk.evaluate` prints a Markdown table. An answer counts only
if every character up to the end token is right.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.standalone.demo.clerk.model import FOLDER
from services.standalone.demo.clerk.tasks import TASKS, Example, examples

_BATCH: Final = 64
_MAX_NEW_TOKENS: Final = 96
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One task's count; `wrong` holds each wrong answer with its example."""

    task: str
    num_right: int
    num_asked: int
    wrong: tuple[tuple[Example, str], ...]


class Clerk:
    """The saved model, answering as a user would see it."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=_DTYPES[dtype])

    def answer(self, prompts: Sequence[str]) -> list[str]:
        """Each answer up to its end token; one that never ends, up to the limit, which is longer
        than any answer."""
        inputs = self._tokenizer(list(prompts), return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        with torch.inference_mode():
            ids = self._model.generate(**inputs, max_new_tokens=_MAX_NEW_TOKENS, do_sample=False)
        texts = self._tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :])
        return [text.split(self._tokenizer.eos_token)[0] for text in texts]


def evaluate(clerk: Clerk, asked: Sequence[Example]) -> list[Score]:
    """Ask everything, similar lengths together, and count by task."""
    in_order = sorted(asked, key=lambda example: (example.task, len(example.prompt)))
    wrong: list[tuple[Example, str]] = []
    for start in range(0, len(in_order), _BATCH):
        batch = in_order[start : start + _BATCH]
        answers = clerk.answer([example.prompt for example in batch])
        wrong += [
            (example, reply)
            for example, reply in zip(batch, answers, strict=True)
            if reply != example.answer
        ]
    num_asked = Counter(example.task for example in asked)
    num_wrong = Counter(example.task for example, _ in wrong)
    return [
        Score(
            task=task,
            num_right=num_asked[task] - num_wrong[task],
            num_asked=num_asked[task],
            wrong=tuple(pair for pair in wrong if pair[0].task == task),
        )
        for task in TASKS
    ]


def table(scores: Sequence[Score]) -> str:
    """Markdown, with the sum of all tasks in the last row."""
    rows = [(score.task, score.num_right, score.num_asked) for score in scores]
    rows.append(
        ("all", sum(score.num_right for score in scores), sum(score.num_asked for score in scores))
    )
    lines = [
        f"| {task} | {right} of {asked} | {right / max(1, asked):.2%} |"
        for task, right, asked in rows
    ]
    return "\n".join(["| task | exact | share |", "|---|---|---|", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument(
        "--num", type=int, default=3000, help="prompts, shared evenly among the tasks"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=_DTYPES, default="float32")
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print for each task")
    given = parser.parse_args()
    scores = evaluate(Clerk(given.folder, given.dtype), examples(given.seed, given.num, "unseen"))
    print(table(scores))
    for score in scores:
        for example, reply in score.wrong[: given.show]:
            print(f"{example.prompt!r}: {reply!r} instead of {example.answer!r}")


if __name__ == "__main__":
    main()
