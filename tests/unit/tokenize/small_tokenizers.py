"""Two small tokenizers of the kinds that models have: byte-level, and words with bytes for all else."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def byte_level() -> Tokenizer:
    """A token per byte, some of several bytes (two of them end inside a character), and a special one, the last."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġhello", "ðŁĺ", "¬ðŁ"]
    tokenizer = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Words with a leading space, and bytes for all else, as in SentencePiece models."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁hello", "▁world", "▁", "lo"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer
