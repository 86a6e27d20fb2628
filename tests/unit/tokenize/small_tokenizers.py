"""Small tokenizers of the kinds that models have: byte-level, words with bytes for all else, word
pieces."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<|end|>"


def id_of(tokenizer: Tokenizer, name: str) -> int:
    """The id of a token that is there."""
    token_id = tokenizer.token_to_id(name)
    assert token_id is not None
    return int(token_id)


def byte_level() -> Tokenizer:
    """A token per byte, some of several bytes (two of them end inside a character), and a special
    one, the last."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġhello", "ðŁĺ", "¬ðŁ"]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Words with a leading space, and bytes for all else, as in SentencePiece models that drop the
    first space."""
    return _sentencepiece(decoders.Strip(" ", 1, 0))


def byte_fallback_with_first_space() -> Tokenizer:
    """The same, as in models whose decoder keeps the first space."""
    return _sentencepiece()


def metaspace() -> Tokenizer:
    """Words with a leading space, the first of which a decoder of another kind drops."""
    pieces = ["<unk>", "▁hello", "▁true", "true", "▁", "lo", "!", "é"]
    tokenizer = Tokenizer(
        models.WordLevel({piece: number for number, piece in enumerate(pieces)}, "<unk>")
    )
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def added_tokens() -> Tokenizer:
    """Byte-level, with added tokens: special ones, and ordinary ones with spaces and letters of
    their own."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("naïve  é"), AddedToken("\n\n")])
    tokenizer.add_special_tokens([AddedToken("<|channel|>", special=True)])
    return tokenizer


def word_pieces() -> Tokenizer:
    """Words, and pieces that go on with one; spaces are the decoder's."""
    pieces = ["[UNK]", "hello", "##lo", "true", ".", "é", "##!"]
    tokenizer = Tokenizer(models.WordPiece({piece: number for number, piece in enumerate(pieces)}))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


def _sentencepiece(*last: decoders.Decoder) -> Tokenizer:
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁hello", "▁world", "▁", "lo"]
    pieces: Sequence[str] = [*names, "▁true", "true", "\ufffd"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return tokenizer
