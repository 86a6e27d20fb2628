"""The tokenizer of a GGUF header, as the `tokenizer.json` of its model has it. Knows no file.

A header has the vocabulary, its merges or scores, and the name of the rule that cuts text before;
normalizer and decoder follow from the kind of vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from transformers.tokenization_utils_base import generate_merges

from shardline_gguf import GgufHeader, refuse

KEY = "tokenizer.ggml."
NONE = ("none", "no_vocab")
CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that are found whole in a text."""
SPACE = "\u2581"
NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

WORD_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
REST_OF_PATHS = REST.replace("[\\r\\n]*|", "[\\r\\n/]*|")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*",
)

LLAMA3 = rf"{WORD_ENDS}|{LETTERS}|\p{{N}}{{1,3}}|{REST}"
QWEN2 = rf"{WORD_ENDS}|{LETTERS}|\p{{N}}|{REST}"
WITH_MARKS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
QWEN35 = rf"{WORD_ENDS}|{WITH_MARKS}|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = rf"{CASED[0]}|{CASED[1]}|\p{{N}}|{REST_OF_PATHS}"
GPT4O = rf"{CASED[0]}{WORD_ENDS}?|{CASED[1]}{WORD_ENDS}?|\p{{N}}{{1,3}}|{REST_OF_PATHS}"
SEED = rf"{WORD_ENDS}|{LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
LIKE_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon-h1", "pixtral", "lfm2")
REGEXES = {
    **dict.fromkeys((*LIKE_LLAMA3, "falcon3", "smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), LLAMA3),
    "seed-coder": SEED,
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), QWEN2),
    "qwen35": QWEN35,
    "tekken": TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), GPT4O),
}
GPT2 = ("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "exaone4")
"""Cut as GPT-2 cuts."""
SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Cut as GPT-2 cuts, each digit alone."""
DEEPSEEK = ("deepseek-v3", "hunyuan-dense")
DEEPSEEK_STEPS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
"""Cut in turn."""
COMPOSED = ("qwen2", "qwen35", "deepseek-r1-qwen")
"""Text is brought into Unicode's composed form before."""
WHOLE_WORDS = (*LIKE_LLAMA3, "smaug-bpe", "tekken")
"""A word of the vocabulary is one token, regardless of the merges."""
BEGIN_WITH_BOS = (*LIKE_LLAMA3, "tekken")


def tokenizer_of(header: GgufHeader) -> Tokenizer | None:
    """Returns a header's tokenizer, or None where it has none: then only token ids are taken.
    Raises Invalid for a vocabulary of a kind that is not read."""
    kind = header.metadata.get(f"{KEY}model", NONE[0])
    if kind in NONE:
        return None
    build = KINDS.get(kind) if isinstance(kind, str) else None
    if build is None:
        refuse(
            f"{header.path} has a vocabulary of kind {kind!r}; read are {', '.join(KINDS)}",
            "Give the model in safetensors",
        )
    tokens = _list(header, "tokens", str)
    try:
        tokenizer = build(header, tokens)
        _add_whole_tokens(tokenizer, tokens, _list(header, "token_type", int))
        _add_ends(tokenizer, header, tokens)
    except Exception as error:  # noqa: BLE001 (the library raises no narrower one)
        refuse(f"the vocabulary of {header.path} is none: {error}", cause=error)
    if tokenizer.get_vocab_size() > len(tokens):
        refuse(f"{header.path} has special tokens outside its vocabulary of {len(tokens):,}")
    return tokenizer


def tokenizer_config(header: GgufHeader) -> dict[str, Any]:
    """Returns the chat template and special tokens of a header, as `tokenizer_config.json` has
    them."""
    tokens = header.metadata.get(f"{KEY}tokens")
    found: dict[str, Any] = {}
    for name, key in NAMES.items():
        number = header.metadata.get(KEY + key)
        if isinstance(tokens, list) and type(number) is int and 0 <= number < len(tokens):
            found[name] = tokens[number]
    template = header.metadata.get("tokenizer.chat_template")
    return {**found, "chat_template": template} if isinstance(template, str) else found


def _bytes_bpe(header: GgufHeader, tokens: Sequence[str]) -> Tokenizer:
    """Byte-level BPE: each byte of a text is a letter of the vocabulary."""
    rule = header.metadata.get(f"{KEY}pre")
    merges = _pairs(_list(header, "merges", str))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    whole = rule in WHOLE_WORDS
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=whole))
    tokenizer.pre_tokenizer = _pre_tokenizer(header, rule)
    if rule in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(header: GgufHeader, rule: Any) -> PreTokenizer:
    if rule in DEEPSEEK:
        steps = [Split(Regex(each), behavior="isolated") for each in DEEPSEEK_STEPS]
        return PreTokenizers([*steps, ByteLevel(add_prefix_space=False, use_regex=False)])
    if rule in GPT2:
        return ByteLevel(add_prefix_space=False)
    if rule in SINGLE_DIGITS:
        return PreTokenizers([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    if rule not in REGEXES:
        known = ", ".join(sorted((*GPT2, *SINGLE_DIGITS, *DEEPSEEK, *REGEXES)))
        refuse(
            f"{header.path} cuts text as {rule!r} (tokenizer.ggml.pre); known are {known}",
            "Give the model in safetensors",
        )
    return PreTokenizers(
        [
            Split(Regex(REGEXES[rule]), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _sentencepiece(header: GgufHeader, tokens: Sequence[str]) -> Tokenizer:
    """BPE over characters, with a token for each byte of a character that is not in it."""
    is_gemma = header.architecture.startswith("gemma")
    if is_gemma:
        # A file has runs of spaces as text has them; the model's own vocabulary does not.
        tokens = [
            SPACE * len(token) if token and not token.strip(" ") else token for token in tokens
        ]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = _pairs(_list(header, "merges", str))
    if not merges:
        ranks = [-float(n) for n in range(len(tokens))]
        # Gemma's scores are not in the order of its merges, its tokens are.
        scores = ranks if is_gemma else _list(header, "scores", float)
        if len(scores) != len(tokens):
            refuse(f"{header.path} has {len(scores):,} scores for {len(tokens):,} tokens")
        merges = generate_merges(vocabulary, dict(zip(tokens, scores, strict=True)))
    unknown = header.metadata.get(f"{KEY}unknown_token_id", 0)
    tokenizer = Tokenizer(
        BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = header.metadata.get(f"{KEY}add_space_prefix", not is_gemma)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    spaces = normalizers.Replace(" ", SPACE)
    if has_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        steps.append(decoders.Strip(content=" ", left=1))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


KINDS: Mapping[str, Callable[[GgufHeader, Sequence[str]], Tokenizer]] = {
    "gpt2": _bytes_bpe,
    "llama": _sentencepiece,
    "gemma4": _sentencepiece,
}


def _add_whole_tokens(tokenizer: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    by_kind = {
        kind: [
            AddedToken(token, normalized=False, special=kind == CONTROL)
            for token, each in zip(tokens, kinds, strict=False)
            if each == kind and token
        ]
        for kind in (CONTROL, USER_DEFINED)
    }
    tokenizer.add_special_tokens(by_kind[CONTROL])
    tokenizer.add_tokens(by_kind[USER_DEFINED])


def _add_ends(tokenizer: Tokenizer, header: GgufHeader, tokens: Sequence[str]) -> None:
    """A text of the model's own begins, or ends, with a token."""
    metadata = header.metadata
    is_pieces = metadata[f"{KEY}model"] == "llama"
    begins = is_pieces or metadata.get(f"{KEY}pre") in BEGIN_WITH_BOS
    wanted = {
        "bos_token_id": metadata.get(f"{KEY}add_bos_token", begins),
        "eos_token_id": metadata.get(f"{KEY}add_eos_token", False),
    }
    ids = {key: metadata[KEY + key] for key, is_added in wanted.items() if is_added}
    if not ids:
        return
    names = {key: tokens[number] for key, number in ids.items()}
    ends = [names.get("bos_token_id"), "$A", names.get("eos_token_id")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[end for end in ends if end is not None],
        special_tokens=[(names[key], number) for key, number in ids.items()],
    )


def _pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    halves = [merge.partition(" ") for merge in merges]
    return [(first, second) for first, _, second in halves]


def _list(header: GgufHeader, key: str, kind: type) -> list[Any]:
    """Returns an array of the metadata, empty where it has none."""
    found = header.metadata.get(KEY + key, [])
    if not isinstance(found, list) or (found and not isinstance(found[0], kind)):
        refuse(f"{header.path} has {KEY}{key} of another kind than a list of {kind.__name__}")
    return found
