"""From prompts to token ids and back, without transformers. Needs the extra `tokenise`; knows no database."""

from shardline.tokenise.chat import ChatTemplate
from shardline.tokenise.completion import CompletionText, Vocabulary
from shardline.tokenise.folder import model_row
from shardline.tokenise.tokenizer_cache import RegisteredModel, TokenizerCache
from shardline.tokenise.tokens import Prepared, Tokens

__all__ = [
    "ChatTemplate",
    "CompletionText",
    "Prepared",
    "RegisteredModel",
    "TokenizerCache",
    "Tokens",
    "Vocabulary",
    "model_row",
]
