"""A stage: a Celery worker pinned to one device, with a resident engine that runs one shard."""

import os

# Weights and KV in pages of 2 MiB, where Linux gives them, are read in a tenth less time. torch
# looks once.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
