"""From prompts to token ids and back, without transformers. Needs the extra `tokenise`; knows no database."""

from shardline.tokenise.chat import ChatTemplate
from shardline.tokenise.completion import Completion, Vocabulary
from shardline.tokenise.folder import model_row
from shardline.tokenise.tokens import Prepared, Tokens

__all__ = ["ChatTemplate", "Completion", "Prepared", "Tokens", "Vocabulary", "model_row"]
