"""Turns prompts into token ids and back, without transformers. Needs the extra `tokenize`; knows no
database."""

from shardline_server.tokenize.chat import ChatTemplate
from shardline_server.tokenize.completion import CompletionText
from shardline_server.tokenize.folder import (
    chosen_template,
    model_row,
    tokenizer_json,
    tokenizers_eos_id,
)
from shardline_server.tokenize.prepared_prompt import PreparedPrompt
from shardline_server.tokenize.token_texts import TokenText, TokenTexts
from shardline_server.tokenize.tokenizer_cache import RegisteredModel, TokenizerCache, addresses
from shardline_server.tokenize.tokens import Tokens
from shardline_server.tokenize.vocabulary import BROKEN, Piece, Vocabulary

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
    "chosen_template",
    "model_row",
    "tokenizer_json",
    "tokenizers_eos_id",
]
