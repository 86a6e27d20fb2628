"""Parses the text of a chat for the columns of its result. Knows no job's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardline.contract.chat import ToolCall
from shardline_server.store.claims import ClaimedJob
from shardline_server.tokenize import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyColumns:
    """Columns of a chat's result. A prompt's completion and a question's answer have none of
    them."""

    reasoning: str | None = None
    num_reasoning_tokens: int | None = None
    tool_calls: tuple[ToolCall, ...] = ()


class ChatReplies:
    """Reads the texts of one model's chats."""

    def __init__(self, tokens: Tokens) -> None:
        self._format = tokens.chat

    def read(self, row: ClaimedJob, text: str, output_ids: Sequence[int]) -> ReplyColumns:
        """Returns the parsed parts of a completion, whole or partial."""
        if not row.is_chat or row.params.question is not None:
            return ReplyColumns()
        reply = self._format.reply(text, row.params, row.job_id, row.prompt_ids)
        return ReplyColumns(
            reasoning=reply.reasoning,
            num_reasoning_tokens=self._format.num_reasoning_tokens(reply, text, output_ids),
            tool_calls=reply.tool_calls,
        )
