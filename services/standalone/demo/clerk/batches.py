"""Owns how examples become training rows: several in one row, apart by their positions. Knows no
model.

A row holds whole examples end to end. Positions start again at 0 with each example; transformers
reads that as a border which attention does not cross, so no place in a row is wasted on padding but
its end.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch
from transformers import PreTrainedTokenizerFast

from services.standalone.demo.clerk.tasks import Example

IGNORED: Final = -100  # the label that cross entropy leaves out


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRows:
    """Labels stand at the place that predicts them; only answers and their end token have one."""

    ids: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor


def pack(
    tokenizer: PreTrainedTokenizerFast, examples: Iterable[Example], row_tokens: int
) -> TrainingRows:
    """Pack examples into rows by first fit, the longest example first."""
    rows: list[list[tuple[list[int], list[int]]]] = []
    free: list[int] = []
    for ids, labels in sorted(_encode(tokenizer, examples), key=lambda pair: -len(pair[0])):
        if len(ids) > row_tokens:
            raise ValueError(
                f"an example has {len(ids)} tokens; row_tokens is {row_tokens}: make it larger"
            )
        row = next((index for index, places in enumerate(free) if places >= len(ids)), len(free))
        if row == len(free):
            rows.append([])
            free.append(row_tokens)
        rows[row].append((ids, labels))
        free[row] -= len(ids)
    pad = int(tokenizer.pad_token_id)
    return TrainingRows(
        ids=torch.tensor(
            [_fill([i for ids, _ in row for i in ids], row_tokens, pad) for row in rows]
        ),
        positions=torch.tensor([_positions(row, row_tokens) for row in rows]),
        labels=torch.tensor(
            [_fill([i for _, labels in row for i in labels], row_tokens, IGNORED) for row in rows]
        ),
    )


def _encode(
    tokenizer: PreTrainedTokenizerFast, examples: Iterable[Example]
) -> list[tuple[list[int], list[int]]]:
    chosen = list(examples)
    prompts = tokenizer([example.prompt for example in chosen]).input_ids
    answers = tokenizer([example.answer for example in chosen], add_special_tokens=False).input_ids
    return [
        (prompt + answer, [IGNORED] * (len(prompt) - 1) + answer + [int(tokenizer.eos_token_id)])
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def _positions(row: list[tuple[list[int], list[int]]], row_tokens: int) -> list[int]:
    used = [place for ids, _ in row for place in range(len(ids))]
    return used + list(range(row_tokens - len(used)))


def _fill(values: list[int], length: int, filler: int) -> list[int]:
    return values + [filler] * (length - len(values))
