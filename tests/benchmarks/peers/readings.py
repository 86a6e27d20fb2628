"""What engines foretell of texts: the texts, and how far logits are from those of float32. Knows no
engine."""

from __future__ import annotations

import math
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tests.benchmarks.perplexity import MAX_CHARS, WINDOW
from tests.repository import REPOSITORY

Window = tuple[int, ...]


@dataclass(slots=True)
class Score:
    """Sums over the tokens of windows."""

    num_tokens: int = 0
    loss: float = 0.0
    divergence: float = 0.0
    num_same: int = 0

    def add(self, logits: Tensor, exact: Tensor, ids: Sequence[int]) -> None:
        """One window more. `logits` and `exact` are float32 [ids, vocabulary]: those to score, and
        float32's log-probabilities."""
        logprobs = torch.log_softmax(logits[:-1], -1)
        known = exact[:-1]
        targets = torch.tensor(ids[1:])[:, None]
        self.num_tokens += len(targets)
        self.loss -= logprobs.gather(1, targets).double().sum().item()
        self.divergence += (known.exp() * (known - logprobs)).double().sum().item()
        self.num_same += int((logprobs.argmax(-1) == known.argmax(-1)).sum())

    @property
    def perplexity(self) -> float:
        """Of all tokens but the first of each window."""
        return math.exp(self.loss / self.num_tokens)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How near an engine is to float32 over all texts."""

    same: float
    """Share of tokens whose likeliest successor is the same."""
    divergence: float
    """Kullback-Leibler, nats a token."""

    @classmethod
    def of(cls, scores: Sequence[Score]) -> Agreement:
        """Every token counts once."""
        num_tokens = sum(score.num_tokens for score in scores)
        return cls(
            same=sum(score.num_same for score in scores) / num_tokens,
            divergence=sum(score.divergence for score in scores) / num_tokens,
        )


def windows(tokenizer: Path, limit: int = 0) -> dict[str, list[Window]]:
    """The texts as windows of token ids, by what they are; at most `limit` of each, 0: all."""
    cut = Tokenizer.from_file(str(tokenizer))
    found = {}
    for name, text in texts().items():
        ids = cut.encode(text, add_special_tokens=False).ids
        starts = range(0, len(ids) - WINDOW + 1, WINDOW)
        each = [tuple(ids[start : start + WINDOW]) for start in starts]
        found[name] = each[:limit] if limit else each
    return found


def texts() -> dict[str, str]:
    """Decisions of this project, numpy's license and a module of Python's library, 24,000
    characters of each."""
    decisions = sorted((REPOSITORY / "docs" / "decisions").glob("*.md"))
    (license_file,) = (
        file for file in metadata.files("numpy") or [] if file.match("licenses/LICENSE.txt")
    )
    found = {
        "prose": "\n".join(path.read_text(encoding="utf-8") for path in decisions),
        "license": license_file.read_text(encoding="utf-8"),
        "code": Path(tokenize.__file__).read_text(encoding="utf-8"),
    }
    return {name: text[:MAX_CHARS] for name, text in found.items()}
