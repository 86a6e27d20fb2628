"""Attention over paged KV. Knows no model and no step."""
