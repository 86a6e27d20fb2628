"""A job's deltas through Redis: written by the head, followed by readers. Never truth: what is lost
is in Postgres."""

from shardline.streams.cursor import Cursor, Place, TextOf
from shardline.streams.reader import DeltaBuffer, DeltaReader, SyncDeltaReader
from shardline.streams.writer import DeltaWriter

__all__ = [
    "Cursor",
    "DeltaBuffer",
    "DeltaReader",
    "DeltaWriter",
    "Place",
    "SyncDeltaReader",
    "TextOf",
]
