"""A shard of a model: which layers, their weights, and products that keep every bit. Knows no
step."""
