"""Layers with weights that are read from a file in each step."""
