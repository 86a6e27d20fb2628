"""What a model has written, as a reply: content, reasoning, calls. Pure and incremental; knows no
tokens, no job and no template engine."""

from shardline_server.replies.families import FAMILIES, Family, family_of, named
from shardline_server.replies.reply_parser import ReplyParser, joined, parse
from shardline_server.replies.reply_sink import merged

__all__ = ["FAMILIES", "Family", "ReplyParser", "family_of", "joined", "merged", "named", "parse"]
