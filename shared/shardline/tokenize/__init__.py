"""Turns prompts into token ids and back, without transformers. Needs the extra `tokenize`; knows no
database."""

from shardline.tokenize.chat import ChatTemplate
from shardline.tokenize.completion import CompletionText
from shardline.tokenize.folder import model_row, tokenizer_json, tokenizers_eos_id
from shardline.tokenize.token_texts import TokenText, TokenTexts
from shardline.tokenize.tokenizer_cache import RegisteredModel, TokenizerCache, addresses
from shardline.tokenize.tokens import PreparedPrompt, Tokens
from shardline.tokenize.vocabulary import BROKEN, Piece, Vocabulary

__all__ = [
    "BROKEN",
    "ChatTemplate",
    "CompletionText",
    "Piece",
    "PreparedPrompt",
    "RegisteredModel",
    "TokenText",
    "TokenTexts",
    "TokenizerCache",
    "Tokens",
    "Vocabulary",
    "addresses",
    "model_row",
    "tokenizer_json",
    "tokenizers_eos_id",
]
