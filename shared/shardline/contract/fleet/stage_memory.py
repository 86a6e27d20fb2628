"""What a stage's memory holds next to its weights and KV: stages take it, and planners reckon with
it."""

from __future__ import annotations

PACKING_FACTOR = 1.05
"""Weights take this many times their size at most: while linear layers are packed, the largest
exists twice."""
NUM_BUFFERS = 2
"""Of streamed layers: one to compute from, one to fetch into."""
