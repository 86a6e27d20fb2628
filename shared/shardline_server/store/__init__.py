"""What services do with rows: prepare, send, claim, lease, end, sweep. Knows no Redis and no
tokenizer.
"""
