"""Prompts that end inside the assistant's last message, for the completion to go on with it. Knows
no template and no tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shardline.base.errors import Invalid
from shardline.contract.chat import Message

ASSISTANT = "assistant"
END_MARK = "50619283745"
"""Digits, which no template changes: where the rendered message ends."""


def with_end_mark(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Returns the messages with a mark behind the last one's content. Raises Invalid for a last one
    that is not the assistant's."""
    *before, last = messages
    if last.role != ASSISTANT:
        raise Invalid(
            f"messages[{len(before)}]",
            f"its role is {last.role[:64]!r}: continue_final_message goes on with the assistant's",
            "End with a message of role assistant, or leave continue_final_message out",
        )
    if not isinstance(last.content, str):
        raise Invalid(
            f"messages[{len(before)}].content",
            "it is no text: continue_final_message goes on with one",
            "Send the text to go on with",
        )
    return (*before, msgspec.structs.replace(last, content=last.content + END_MARK))


def up_to_end_mark(text: str) -> str:
    """Returns the rendered text before the mark. Raises Invalid where the template drops it."""
    before, mark, _ = text.rpartition(END_MARK)
    if not mark:
        raise Invalid(
            "continue_final_message",
            "the model's chat template does not render the end of the last message",
            "Leave it out for this model",
        )
    return before
