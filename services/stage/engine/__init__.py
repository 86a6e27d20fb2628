"""The engine: scheduler, KV blocks, shard, attention, sampling. Knows neither Celery, Redis nor Postgres."""
