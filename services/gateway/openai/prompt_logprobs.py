"""Log-probabilities of a prompt's tokens in vLLM's form, and in OpenAI's where a completion echoes
the prompt. Knows no request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from services.gateway.openai import bodies
from shardline.contract.job import PromptLogprob, TokenLogprob
from shardline_server.tokenize import BROKEN, Piece, TokenTexts, Vocabulary

Scored = TokenLogprob | PromptLogprob
"""A token of a completion, or of its prompt."""

Entries = Sequence[PromptLogprob | None]
"""One for each token of a prompt, None for the first."""


class AlternativeTexts(Protocol):
    """What tells the texts of tokens that could have come."""

    @property
    def alternative(self) -> Callable[[int], Piece]:
        """Tells the text of one of them by its id."""


def ranked_logprobs(
    entries: Entries | None, vocabulary: Vocabulary
) -> list[dict[str, bodies.RankedLogprob] | None] | None:
    """Returns for each token those of the likeliest ones, by id, and among or behind them its own;
    None if a result of an earlier release has none."""
    if entries is None:
        return None
    return [None if entry is None else _ranked(entry, vocabulary) for entry in entries]


def _ranked(entry: PromptLogprob, vocabulary: Vocabulary) -> dict[str, bodies.RankedLogprob]:
    ranks = {token_id: (rank, value) for rank, (token_id, value) in enumerate(entry.top, 1)}
    ranks[entry.token_id] = (entry.rank, entry.logprob)
    return {
        str(token_id): bodies.RankedLogprob(
            logprob=value, rank=rank, decoded_token=_text_of(token_id, vocabulary)
        )
        for token_id, (rank, value) in ranks.items()
    }


def _text_of(token_id: int, vocabulary: Vocabulary) -> str:
    has_text = vocabulary.has_text(token_id, with_special=False)
    return vocabulary.piece(token_id).text if has_text else vocabulary.name(token_id)


def echoed_logprobs(
    prompt_ids: Sequence[int], entries: Entries, texts: TokenTexts, num_top: int
) -> bodies.TextLogprobs:
    """Returns those of a prompt's tokens with at most `num_top` alternatives each; `texts` has had
    no token yet."""
    tokens = texts.push(prompt_ids, is_end=True)
    pairs = list(zip(entries, tokens, strict=True))
    return bodies.TextLogprobs(
        tokens=[token.text for token in tokens],
        token_logprobs=[None if entry is None else entry.logprob for entry in entries],
        top_logprobs=[
            None if entry is None else likeliest(_with_top(entry, num_top), token.text, texts)
            for entry, token in pairs
        ],
        text_offset=[token.offset for token in tokens],
    )


def joined_logprobs(
    prompt: bodies.TextLogprobs, completion: bodies.TextLogprobs, num_chars: int
) -> bodies.TextLogprobs:
    """Returns those of a text that begins with `num_chars` characters of a prompt."""
    return bodies.TextLogprobs(
        tokens=prompt.tokens + completion.tokens,
        token_logprobs=prompt.token_logprobs + completion.token_logprobs,
        top_logprobs=prompt.top_logprobs + completion.top_logprobs,
        text_offset=prompt.text_offset + [num_chars + each for each in completion.text_offset],
    )


def _with_top(entry: PromptLogprob, num_top: int) -> TokenLogprob:
    return TokenLogprob(entry.token_id, entry.logprob, entry.top[:num_top])


def likeliest(entry: Scored, text: str, texts: AlternativeTexts) -> dict[str, float]:
    """Alternatives by text, likeliest first, and among or behind them the output token, with the
    text `text`. Of tokens with one text, all but the first are named by their id."""
    found: dict[str, float] = {}
    for token_id, logprob in entry.top:
        name = text
        if token_id != entry.token_id:
            name = _shown(texts.alternative(token_id))
            if name in found or name == text:
                name = f"token_id:{token_id}"
        found[name] = logprob
    found.setdefault(text, entry.logprob)
    return found


def _shown(piece: Piece) -> str:
    """The text of a token, or its bytes, in OpenAI's form, where they are no whole characters."""
    if BROKEN not in piece.text or piece.data == piece.text.encode():
        return piece.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece.data)
