"""From prompts to token ids and back, without transformers. Needs the extra `tokenize`; knows no database."""

from shardline.tokenize.chat import ChatTemplate
from shardline.tokenize.completion import CompletionText, Vocabulary
from shardline.tokenize.folder import model_row
from shardline.tokenize.tokenizer_cache import RegisteredModel, TokenizerCache, addresses
from shardline.tokenize.tokens import Prepared, Tokens

__all__ = [
    "ChatTemplate",
    "CompletionText",
    "Prepared",
    "RegisteredModel",
    "TokenizerCache",
    "Tokens",
    "Vocabulary",
    "addresses",
    "model_row",
]
