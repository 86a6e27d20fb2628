"""Layers that keep a state of a fixed size for each sequence, with or without keys
and values."""
