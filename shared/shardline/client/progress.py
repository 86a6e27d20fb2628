"""The rule by which a follower turns rows of its job into text. Knows no stream and no connection."""

from __future__ import annotations

from collections.abc import Callable

from shardline.job import SamplingParams
from shardline.streams import TextOf

TextRule = Callable[[SamplingParams, int], TextOf]
"""For a job of these parameters and `max_tokens`: the text that a head gives out with its tokens."""
