"""Contents as lists of parts, for templates that render nothing else: many of multimodal models.
Found by trying; knows no request."""

from __future__ import annotations

from shardline.base.errors import Invalid
from shardline_server.tokenize.template_abilities import USER, Document, Render


def takes_parts_alone(render: Render) -> bool:
    """Returns whether a template renders the text of a part and not a content that is a text."""
    return not _is_said(render, USER) and _is_said(render, with_parts(USER))


def with_parts(message: Document) -> Document:
    """Returns the message with its text as the only part of its content."""
    content = message["content"]
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}] if content else []}


def _is_said(render: Render, message: Document) -> bool:
    """Whether the text is there, and not as Python writes a list that holds it."""
    try:
        text = render([message], {"add_generation_prompt": True}) or ""
    except Invalid:
        return False
    return USER["content"] in text and "'type'" not in text
