"""What producers and services agree on: jobs, tables, keys, queues, messages."""
