"""Layers that keep a state of a fixed size for each sequence, besides keys and
values or instead of them."""
