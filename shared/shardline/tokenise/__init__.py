"""From prompts to token ids and back, without transformers. Needs the extra `tokenise`; knows no database."""

from shardline.tokenise.chat import ChatTemplate
from shardline.tokenise.folder import model_row
from shardline.tokenise.tokens import Prepared, Tokens

__all__ = ["ChatTemplate", "Prepared", "Tokens", "model_row"]
