"""Owns the clerical tasks: seeded prompts with their exact answers, and which prompts are never
trained on.

Knows no tensor and no tokenizer. The answer is exactly the completion that the model must give,
before its end token.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from hashlib import sha256
from itertools import islice
from random import Random
from typing import Final, Literal

from services.standalone.demo.clerk.numerals import LIMIT, ordinal, spell
from services.standalone.demo.clerk.orders import write_order

Split = Literal["train", "unseen"]
UNSEEN_SHARE: Final = 16  # one prompt in this many is kept from training

_DATE_STYLES: Final = (
    "{day} {month} {year}",
    "{day} {short} {year}",
    "{nth} of {month} {year}",
    "the {nth} of {month}, {year}",
    "{month} {day}, {year}",
    "{short} {nth}, {year}",
    "{weekday}, {day} {month} {year}",
    "{day}.{number}.{year}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One prompt and the only right answer to it."""

    task: str
    prompt: str
    answer: str


def examples(
    seed: int, num: int, split: Split = "train", turns: Sequence[str] = ()
) -> list[Example]:
    """`num` examples; the same seed gives the same list, and no prompt is in both splits.

    Tasks take turns in the order of `turns` (a task named twice comes twice as often), else once
    each.
    """
    if num < 0:
        raise ValueError(f"num is {num}; ask for 0 or more examples")
    if unknown := set(turns) - set(TASKS):
        raise ValueError(f"turns names {sorted(unknown)}; clerk's tasks are {list(TASKS)}")
    return list(
        islice(_endless(Random(f"clerk-{split}-{seed}"), split, turns or tuple(TASKS)), num)
    )


def is_unseen(prompt: str) -> bool:
    """Decided by the prompt's own hash, so that no list of held-out prompts is kept anywhere."""
    return sha256(prompt.encode()).digest()[0] % UNSEEN_SHARE == 0


def _endless(rng: Random, split: Split, turns: Sequence[str]) -> Iterator[Example]:
    while True:
        for task in turns:
            yield _draw(rng, split, task)


def _draw(rng: Random, split: Split, task: str) -> Example:
    while True:
        question, answer = TASKS[task](rng)
        prompt = f"{task}: {question} ="
        if is_unseen(prompt) == (split == "unseen"):
            return Example(task=task, prompt=prompt, answer=answer)


def _date(rng: Random) -> tuple[str, str]:
    day = date(1900, 1, 1) + timedelta(days=rng.randrange(200 * 365))
    question = rng.choice(_DATE_STYLES).format(
        day=day.day,
        nth=ordinal(day.day),
        month=f"{day:%B}",
        short=f"{day:%b}",
        number=day.month,
        weekday=f"{day:%A}",
        year=day.year,
    )
    return question, day.isoformat()


def _number(rng: Random) -> int:
    """Long numbers are harder and more of them exist, so they come more often, but not as often as
    uniformly."""
    num_digits = rng.choices(range(1, 7), weights=(1, 2, 4, 5, 6, 7))[0]
    return rng.randrange(
        10 ** (num_digits - 1) if num_digits > 1 else 0, min(LIMIT, 10**num_digits)
    )


def _words(rng: Random) -> tuple[str, str]:
    number = _number(rng)
    return str(number), spell(number)


def _digits(rng: Random) -> tuple[str, str]:
    number = _number(rng)
    return spell(number), str(number)


def _sort(rng: Random) -> tuple[str, str]:
    numbers = [rng.randrange(100) for _ in range(rng.randint(3, 5))]
    return ", ".join(map(str, numbers)), ", ".join(map(str, sorted(numbers)))


def _sum(rng: Random) -> tuple[str, str]:
    """The answer shows the work column by column, from the right: a small model cannot carry in its
    head."""
    left = rng.randint(100, 999)
    right = rng.randint(100, 999)
    steps = []
    carry = 0
    for a, b in zip(reversed(str(left)), reversed(str(right)), strict=True):
        total = int(a) + int(b) + carry
        steps.append(f"{a}+{b}+{carry}={total}")
        carry = total // 10
    return f"{left} + {right}", f"{', '.join(steps)}: {left + right}"


TASKS: Final[dict[str, Callable[[Random], tuple[str, str]]]] = {
    "date": _date,
    "words": _words,
    "number": _digits,
    "order": write_order,
    "sort": _sort,
    "sum": _sum,
}
