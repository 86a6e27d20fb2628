"""What a producer imports: submit prompts, wait for completions, follow their tokens. Needs
Postgres; Redis helps.

Owns no SQL (that is `shardline.store`) and no order of tokens (that is `shardline.streams`).
Neither Celery nor torch nor a tokenizer is needed here: relays tokenize what arrives without.
"""

from shardline.client.asynchronous import AsyncClient
from shardline.client.fields import JobFields
from shardline.client.synchronous import Client

__all__ = ["AsyncClient", "Client", "JobFields"]
