"""Layers whose weights are read from a file in each step."""
