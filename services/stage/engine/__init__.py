"""The engine: runs steps on a shard, samples, sends and receives. Knows neither Celery, Redis nor
Postgres."""
