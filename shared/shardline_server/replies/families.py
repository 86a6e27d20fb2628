"""The families of models that write reasoning and calls alike, and how a chat template shows to
which one its model belongs."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from shardline.base.errors import Invalid
from shardline_server.replies import (
    deepseek,
    gemma,
    glm,
    harmony,
    hermes,
    kimi,
    llama,
    mistral,
    plain,
    qwen_xml,
)
from shardline_server.replies.reply_sink import ReplySink
from shardline_server.replies.text_source import Steps, TextSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family of models writes a reply."""

    name: str
    markers: tuple[str, ...]
    """What its parser must see: special tokens with these texts are decoded, all others are not
    part of the reply."""
    read: Callable[[TextSource, ReplySink, str], Steps[None]]
    """Reads a whole reply; takes the end of the prompt too."""
    signs: tuple[tuple[str, ...], ...] = ()
    """Texts of a chat template: the family is that of a template with all texts of one group."""
    id_chars: int | None = None
    """The length of the ids of calls that its template takes, if it is strict."""
    trims: bool = True
    """Whether white space between content and a call belongs to neither."""

    def call_id(self, job_id: uuid.UUID, index: int) -> str:
        """Returns the id of a job's call: the same one after a crash."""
        digest = uuid.uuid5(job_id, f"call {index}").hex
        return digest[: self.id_chars] if self.id_chars else f"call_{digest[:24]}"


_NAMED = re.compile(r"\{#-?\s*replies:\s*([\w-]+)\s*-?#\}")

PLAIN = Family(name="plain", markers=(), read=plain.read)

FAMILIES = {
    family.name: family
    for family in (
        Family(
            name="gpt-oss", markers=harmony.MARKERS, read=harmony.read, signs=(("<|channel|>",),)
        ),
        Family(
            name="kimi-k3",
            markers=kimi.K3_MARKERS,
            read=kimi.read_k3,
            signs=((kimi.OPEN, kimi.CLOSE, kimi.END_TAG),),
            trims=False,
        ),
        Family(
            name="kimi",
            markers=kimi.MARKERS,
            read=kimi.read,
            signs=((kimi.SECTIONS[0],),),
            trims=False,
        ),
        Family(
            name="deepseek",
            markers=deepseek.MARKERS,
            read=deepseek.read,
            signs=((deepseek.CALLS,), (deepseek.DSML,)),
        ),
        Family(
            name="gemma",
            markers=gemma.MARKERS,
            read=gemma.read,
            signs=((gemma.CALL,),),
            trims=False,
        ),
        Family(
            name="mistral",
            markers=mistral.MARKERS,
            read=mistral.read,
            signs=((mistral.CALLS,), (mistral.BRACKET_THINK,)),
            id_chars=9,
        ),
        Family(name="glm", markers=glm.MARKERS, read=glm.read, signs=((glm.KEY,),)),
        Family(
            name="qwen3-xml",
            markers=qwen_xml.MARKERS,
            read=qwen_xml.read,
            signs=((qwen_xml.FUNCTION,),),
        ),
        Family(
            name="granite",
            markers=hermes.GRANITE_MARKERS,
            read=hermes.read_granite,
            signs=(("<|start_of_role|>",),),
        ),
        Family(
            name="smollm",
            markers=hermes.MARKERS,
            read=hermes.read,
            signs=(("xml_tools", "<tool_call>"),),
        ),
        Family(
            name="llama",
            markers=llama.MARKERS,
            read=llama.read,
            signs=(
                (llama.PYTHON_TAG,),
                (llama.PYTHON_START,),
                ("<|start_header_id|>", '"parameters"'),
                ("<|header_start|>",),
            ),
            trims=False,
        ),
        Family(
            name="hermes",
            markers=hermes.MARKERS,
            read=hermes.read,
            signs=((hermes.CALL,), ("</think>",)),
        ),
        PLAIN,
    )
}
"""By name. A template belongs to the first family with signs in the template."""


def named(chat_template: str, name: str) -> str:
    """Returns the template with a comment that names its family. Raises Invalid."""
    return f"{{# replies: {family(name).name} #}}{chat_template}"


def family_of(chat_template: str) -> str:
    """Returns the family that a comment names, `{# replies: hermes #}`, else the one with
    signs in the template; `plain` if none is known: then all text is content."""
    if (named := _NAMED.search(chat_template)) and named[1] in FAMILIES:
        return named[1]
    for family in FAMILIES.values():
        if any(all(sign in chat_template for sign in signs) for signs in family.signs):
            return family.name
    return PLAIN.name


def family(name: str) -> Family:
    """Returns the family of that name; Invalid if there is none."""
    found = FAMILIES.get(name)
    if found is None:
        known = ", ".join(FAMILIES)
        raise Invalid("reply_family", f"{name!r} is no family of models", f"Take one of: {known}")
    return found
