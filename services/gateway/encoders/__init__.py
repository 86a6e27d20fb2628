"""Encoders: the texts of a request become jobs, and their vectors or scores its answer."""
