"""How a model's chats are written and read: its template, the family of its replies, and what holds
a reply to its form. The same for doors, heads and readers of a stream. Knows no limit of a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from uuid import UUID

import msgspec
from tokenizers import Tokenizer

from shardline.contract.chat import Message, Reply
from shardline.contract.job import PROMPT_END_TOKENS, SamplingParams
from shardline.contract.structured_output import StructuredOutput
from shardline.contract.tool_choice import CallableTools, callable_tools
from shardline_server.replies import FAMILIES, ReplyParser, family_of, joined
from shardline_server.tokenize.chat import ChatTemplate
from shardline_server.tokenize.grammars.reply_grammar import (
    CALL_FORMS,
    END_THINK,
    FORCED,
    THINK,
    ReplyGrammar,
    Thinking,
)
from shardline_server.tokenize.template_messages import (
    template_message,
    template_tools,
    template_variables,
)
from shardline_server.tokenize.vocabulary import Vocabulary


class ChatFormat:
    """One model's. Without a template it has no chats, and a reply is all text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        eos_ids: Sequence[int],
        chat_template: str | None,
        special_tokens: Mapping[str, str],
    ) -> None:
        self._template = ChatTemplate(chat_template, special_tokens) if chat_template else None
        self.family = family_of(chat_template or "")
        markers = {*FAMILIES[self.family].markers, *FAMILIES[FORCED].markers}
        self.vocabulary = Vocabulary(
            tokenizer, eos_ids, markers=markers if chat_template else frozenset()
        )

    @property
    def has_template(self) -> bool:
        """Whether it takes messages."""
        return self._template is not None

    def render(
        self, messages: Sequence[Message], params: SamplingParams, *, limit_chars: int
    ) -> str | None:
        """Returns the prompt of a chat, with its tools; None if it is longer. Raises Invalid."""
        assert self._template is not None, "see has_template"
        called = called_by(params)
        return self._template.render(
            [template_message(message) for message in messages],
            limit_chars=limit_chars,
            variables=template_variables(params, self._template.thinking_variables),
            tools=template_tools(called.tools),
            add_generation_prompt=params.add_generation_prompt,
        )

    def parser(
        self, params: SamplingParams, job_id: UUID, prompt_ids: Sequence[int]
    ) -> ReplyParser:
        """Returns what reads the text of one completion, in any pieces; of the prompt its last
        PROMPT_END_TOKENS suffice. A call that must be made is streamed: it cannot turn out to
        be none."""
        called = called_by(params)
        return ReplyParser(
            self._family_for(called, params),
            job_id=job_id,
            tools=called.tools,
            prompt_end=self._prompt_end(prompt_ids),
            tells_early=called.is_required,
        )

    def reply(
        self, text: str, params: SamplingParams, job_id: UUID, prompt_ids: Sequence[int]
    ) -> Reply:
        """Returns the parsed reply of a whole completion."""
        parser = self.parser(params, job_id, prompt_ids)
        return joined((parser.push(text), parser.end()))

    def num_reasoning_tokens(self, reply: Reply, text: str, output_ids: Sequence[int]) -> int:
        """Returns how many of the output tokens come before the reasoning's end."""
        if not reply.reasoning:
            return 0
        num_chars = max(text.find(reply.reasoning), 0) + len(reply.reasoning)
        low = 0
        high = len(output_ids)
        while low < high:
            middle = (low + high) // 2
            if len(self.vocabulary.decode(output_ids[:middle])) < num_chars:
                low = middle + 1
            else:
                high = middle
        return low

    def output_of(
        self, params: SamplingParams, prompt_ids: Sequence[int]
    ) -> StructuredOutput | None:
        """Returns what the reply of a chat must be; None: anything. Raises Invalid."""
        return self._written(self._grammar, params, prompt_ids)

    def checked_output(
        self, params: SamplingParams, prompt_ids: Sequence[int]
    ) -> StructuredOutput | None:
        """Returns `output_of` without ids of tokens, for a check that has no vocabulary. Raises
        Invalid."""
        self.output_of(params, prompt_ids)
        free = msgspec.structs.replace(params, thinking_token_budget=None)
        return self._written(ReplyGrammar({}), free, prompt_ids)

    def _written(
        self, grammar: ReplyGrammar, params: SamplingParams, prompt_ids: Sequence[int]
    ) -> StructuredOutput | None:
        called = called_by(params)
        return grammar.of(
            family=self._family_for(called, params),
            called=called,
            answer=params.structured_outputs,
            thinking=Thinking(
                is_open=self._is_open(prompt_ids),
                may_begin=self._thinks,
                budget=params.thinking_token_budget,
            ),
        )

    @cached_property
    def _grammar(self) -> ReplyGrammar:
        return ReplyGrammar(self.vocabulary.added_tokens, ends=self.vocabulary.eos_ids)

    @property
    def _thinks(self) -> bool:
        source = "" if self._template is None else self._template.source
        return THINK in FAMILIES[self.family].markers and END_THINK in source

    def _family_for(self, called: CallableTools, params: SamplingParams) -> str:
        """The template's family; for calls it may be the one that the tools are described in, or
        that of calls held to a form, where its own form has no grammar."""
        if called.tools:
            is_described = self._template is None or not self._template.abilities.has_tools
            is_held = called.is_required or params.structured_outputs is not None
            is_unknown = is_held and self.family not in CALL_FORMS
            if is_described or is_unknown or not FAMILIES[self.family].markers:
                return FORCED
        return self.family

    def _is_open(self, prompt_ids: Sequence[int]) -> bool:
        end = self._prompt_end(prompt_ids)
        return self._thinks and end.rfind(THINK) > end.rfind(END_THINK)

    def _prompt_end(self, prompt_ids: Sequence[int]) -> str:
        """What the template begins the reply with: the text from the last special token on. What
        comes before is the caller's, and opens nothing."""
        ids = list(prompt_ids[-PROMPT_END_TOKENS:])
        special = set(self.vocabulary.special_tokens.values())
        for place in range(len(ids) - 1, -1, -1):
            if ids[place] in special:
                return str(self.vocabulary.decode(ids[place:]))
        return str(self.vocabulary.decode(ids))


def called_by(params: SamplingParams) -> CallableTools:
    """Returns the tools that a reply may call."""
    return callable_tools(params.tools, params.tool_choice, parallel=params.parallel_tool_calls)
