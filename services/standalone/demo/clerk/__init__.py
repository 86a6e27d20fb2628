"""The demo model `clerk`: its tasks, its tokenizer, its training and its weights. Knows nothing of
Shardline."""
