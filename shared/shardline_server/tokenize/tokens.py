"""Prompts to token ids and back, by a model's own tokenizer and chat template. Owns the limits that
depend on a model.

Knows no database: a `models` row arrives as a mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import msgspec

from shardline.base.errors import ContextExceeded, Invalid
from shardline.contract.chat import Message, Tool
from shardline.contract.decision import FIELD as QUESTION
from shardline.contract.decision import Question
from shardline.contract.encoders.encoder import GENERATE, Encoder
from shardline.contract.job import ALL_THAT_FIT, Prompt, SamplingParams
from shardline.contract.request_parsing import check_is_no_chat, check_params, check_prompt_logprobs
from shardline.contract.structured_output import FIELD as STRUCTURED_OUTPUTS
from shardline.contract.structured_output import StructuredOutput
from shardline_server.tokenize.bad_words import FIELD as BAD_WORDS
from shardline_server.tokenize.bad_words import banned_ids
from shardline_server.tokenize.chat_format import ChatFormat, called_by
from shardline_server.tokenize.completion import CompletionText
from shardline_server.tokenize.continuation import up_to_end_mark, with_end_mark
from shardline_server.tokenize.encoders.encoder_texts import EncoderTexts, check_generates
from shardline_server.tokenize.folder import tokenizer_from
from shardline_server.tokenize.grammars.argument_schema import arguments_schema
from shardline_server.tokenize.grammars.grammar_judge import Question as GrammarQuestion
from shardline_server.tokenize.grammars.grammar_trial import TRIAL, GrammarBudget
from shardline_server.tokenize.prepared_prompt import PreparedPrompt
from shardline_server.tokenize.questions import QuestionLabels
from shardline_server.tokenize.token_texts import TokenTexts

MAX_CHARS_PER_TOKEN = 128
"""No tokenizer in use has longer tokens: text of more than that times the context is refused
unread."""

USUAL_CHARS_PER_TOKEN = 8
"""Hardly any text has more. A tokenizer takes about 110 bytes for each character of a longer one:
its beginning is tried first."""
MIN_BEGINNING = 64 << 10
"""Characters with tokens that cost next to nothing."""


class Tokens:
    """One model's tokenizer, chat template and limits. Without a tokenizer it takes token ids
    only."""

    def __init__(
        self,
        *,
        model: str,
        tokenizer_json: str,
        chat_template: str | None,
        special_tokens: Mapping[str, str],
        context_length: int,
        vocab_size: int,
        eos_ids: Sequence[int],
    ) -> None:
        self.model = model
        self.encoder: Encoder | None = None
        self.context_length = self.longest = context_length
        """`longest` is what a pipeline holds in KV, prompt and completion together; never more than
        the context."""
        self.vocab_size = vocab_size
        self.eos_ids = tuple(eos_ids)
        self.has_tokenizer = bool(tokenizer_json)
        self.tokenizer = tokenizer_from(tokenizer_json)
        self.chat = ChatFormat(
            self.tokenizer,
            eos_ids=self.eos_ids,
            chat_template=chat_template,
            special_tokens=special_tokens,
        )
        self.vocabulary = self.chat.vocabulary
        # Copies share it: finding the labels tokenizes some 700 texts.
        self.question_labels = QuestionLabels(self.tokenizer, self.vocabulary, vocab_size)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Tokens:
        """Load a row of `models`. Raises Invalid when its tokenizer cannot be read."""
        tokens = cls(
            model=row["name"],
            tokenizer_json=row["tokenizer"],
            chat_template=row["chat_template"],
            special_tokens=row["special_tokens"],
            context_length=row["context_length"],
            vocab_size=row["vocab_size"],
            eos_ids=row["eos_token_ids"],
        )
        tokens.encoder = msgspec.convert(row.get("encoder"), Encoder | None)
        return tokens

    def within(self, kv_tokens: int | None) -> Tokens:
        """A copy limited to the `kv_tokens` that pipelines hold; None: no limit is known yet."""
        narrowed = copy(self)
        narrowed.longest = min(self.context_length, kv_tokens or self.context_length)
        return narrowed

    def prepare(
        self,
        *,
        prompt: Prompt | None = None,
        messages: Sequence[Message] | None = None,
        params: SamplingParams,
    ) -> PreparedPrompt:
        """Token ids within every limit of the model. Raises Invalid, naming the field, the limit
        and the remedy."""
        if self.encoder is not None:
            texts = self._encoder_texts(self.encoder)
            return texts.prepare(prompt, params, is_chat=messages is not None)
        check_generates(self.model, params)
        if not prompt and not messages:
            raise Invalid(
                "prompt", "it is empty; at least one token is needed", "Send some text or token ids"
            )
        check_params(params)
        if params.question is not None:
            prompt, messages = self._asked(prompt, messages, params.question)
            params = msgspec.structs.replace(params, max_tokens=1)
        if not messages:
            check_is_no_chat(params)
        field = "messages" if messages else "prompt"
        if messages:
            ids = self.chat_ids(messages, params)
        elif isinstance(prompt, str):
            with_special = params.add_special_tokens is not False
            ids = self.encode(prompt, field="prompt", add_special_tokens=with_special)
        else:
            ids = self._checked("prompt", prompt or ())
        if not ids:
            raise Invalid(
                field, "it is empty; at least one token is needed", "Send some text or token ids"
            )
        self._check_tokens(params)
        if params.question is None:
            self._check_output(params, ids, is_chat=messages is not None)
        ids = self._kept(ids, params)
        check_prompt_logprobs(params, len(ids))
        return PreparedPrompt(prompt_ids=ids, max_tokens=self._max_tokens(field, len(ids), params))

    @property
    def task(self) -> str:
        """What the model is asked for: generate, embed or score."""
        return GENERATE if self.encoder is None else self.encoder.task

    def _encoder_texts(self, encoder: Encoder) -> EncoderTexts:
        return EncoderTexts(
            model=self.model,
            encoder=encoder,
            tokenizer=self.tokenizer if self.has_tokenizer else None,
            longest=self.longest,
            vocab_size=self.vocab_size,
        )

    def prompt_text(self, messages: Sequence[Message], params: SamplingParams) -> str:
        """The text of the messages, up to where the completion begins. Raises Invalid."""
        if params.continue_final_message:
            messages = with_end_mark(messages)
        text = self.render(messages, params)
        return up_to_end_mark(text) if params.continue_final_message else text

    def _check_tokens(self, params: SamplingParams) -> None:
        """Raises Invalid for tokens and texts that the vocabulary does not have."""
        if params.stop and not self.has_tokenizer:
            raise Invalid(
                "stop",
                f"{self.model} has no tokenizer, so its completions have no text",
                "Use stop_token_ids",
            )
        if params.bad_words and not self.has_tokenizer:
            raise Invalid(
                BAD_WORDS, f"{self.model} has no tokenizer", "Use logit_bias, -100 for each id"
            )
        self._checked("stop_token_ids", params.stop_token_ids)
        self._checked("allowed_token_ids", params.allowed_token_ids or ())
        self._checked("logit_bias", tuple(params.logit_bias))
        banned_ids(self.tokenizer, params.bad_words, vocab_size=self.vocab_size)

    def _kept(self, ids: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
        """Returns the last tokens of the prompt, up to the request's limit."""
        num_kept = params.truncate_prompt_tokens
        if num_kept == ALL_THAT_FIT:
            least = max(params.min_tokens, 1) if params.max_tokens is None else params.max_tokens
            num_kept = max(self.longest - least, 1)
        return ids if num_kept is None else ids[-num_kept:]

    def _check_output(self, params: SamplingParams, ids: Sequence[int], *, is_chat: bool) -> None:
        called = called_by(params)
        budget = GrammarBudget()
        for place, tool in enumerate(params.tools):
            if called.is_required or tool.function.strict:
                self._check_tool(place, tool, budget)
        output = self.chat.checked_output(params, ids) if is_chat else params.structured_outputs
        if output is None:
            return
        self._check_can_be_held("tool_choice" if called.is_required else STRUCTURED_OUTPUTS)
        if params.structured_outputs is not None:
            self._check_grammar(params.structured_outputs, budget)
        if output != params.structured_outputs:
            try:
                self._check_grammar(output, budget)
            except Invalid as error:
                raise Invalid("tools", error.problem, "Send simpler tools or schemas") from error

    def _asked(
        self, prompt: Prompt | None, messages: Sequence[Message] | None, question: Question
    ) -> tuple[Prompt | None, Sequence[Message] | None]:
        if not self.has_tokenizer:
            raise Invalid(QUESTION, f"{self.model} has no tokenizer", "Use a model with one")
        return self.question_labels.ask(question, prompt, messages, as_chat=self.chat.has_template)

    def _check_tool(self, place: int, tool: Tool, budget: GrammarBudget) -> None:
        self._check_can_be_held(f"tools[{place}]")
        try:
            self._check_grammar(StructuredOutput(json=arguments_schema(tool.function)), budget)
        except Invalid as error:
            field = f"tools[{place}].function.parameters"
            raise Invalid(field, error.problem, error.remedy) from error

    def _check_can_be_held(self, field: str) -> None:
        lacks = "tokenizer" if not self.has_tokenizer else "" if self.eos_ids else "end token"
        if lacks:
            raise Invalid(field, f"{self.model} has no {lacks}", "Leave it out for this model")

    def _check_grammar(self, output: StructuredOutput, budget: GrammarBudget) -> None:
        # Grammars alone can name tokens.
        special = self.vocabulary.special_tokens if output.kind == "grammar" else {}
        size = self.vocab_size if output.kind == "grammar" else 0
        TRIAL.check(GrammarQuestion(output=output, special=special, vocab_size=size), budget)

    def render(self, messages: Sequence[Message], params: SamplingParams) -> str:
        """Messages and tools as the text that the model was trained on. Raises Invalid."""
        if not self.chat.has_template:
            raise Invalid(
                "messages",
                f"{self.model} has no chat template",
                "Send a prompt to /v1/completions instead",
            )
        text = self.chat.render(messages, params, limit_chars=self._limit_chars)
        if text is None:
            problem = f"they render to more than {self._limit_chars} characters"
            raise ContextExceeded(
                "messages", self.context_length, problem, "Send shorter or fewer messages"
            )
        return text

    def completion(
        self, params: SamplingParams, max_tokens: int, prompt_ids: Sequence[int] | None = None
    ) -> CompletionText:
        """A detokenizer for a prepared job's output, token by token. The prompt's last
        PROMPT_END_TOKENS suffice."""
        return CompletionText(self.vocabulary, params, room=max_tokens, prompt_ids=prompt_ids)

    def text_rule(
        self, params: SamplingParams, max_tokens: int, prompt_ids: Sequence[int]
    ) -> Callable[[Sequence[int]], str]:
        """The text of output tokens as a head streams it, for a reader of a job's stream."""
        return self.completion(params, max_tokens, prompt_ids).say

    def text_of(self, ids: Sequence[int], params: SamplingParams) -> str:
        """The text of tokens that begin a text, such as a prompt's."""
        with_special = not params.skip_special_tokens
        shown = [each for each in ids if self.vocabulary.has_text(each, with_special=with_special)]
        return str(self.vocabulary.decode(shown)) if shown else ""

    def token_texts(self, params: SamplingParams, prompt_ids: Sequence[int]) -> TokenTexts:
        """A completion's tokens one by one, for log-probabilities."""
        return TokenTexts(
            self.vocabulary, prompt_ids=prompt_ids, with_special=not params.skip_special_tokens
        )

    @property
    def _limit_chars(self) -> int:
        return self.context_length * MAX_CHARS_PER_TOKEN

    def chat_ids(self, messages: Sequence[Message], params: SamplingParams) -> tuple[int, ...]:
        """The prompt that messages make, which may be somewhat longer than the context. Raises
        Invalid."""
        text = self.prompt_text(messages, params)
        with_special = params.add_special_tokens is True
        return self.encode(text, field="messages", add_special_tokens=with_special)

    def encode(self, text: str, *, field: str, add_special_tokens: bool) -> tuple[int, ...]:
        """The tokens of a text, at most twice the context. Raises Invalid, naming `field`."""
        if not self.has_tokenizer:
            raise Invalid(
                field, f"{self.model} has no tokenizer", "Send the prompt as a list of token ids"
            )
        if len(text) > self._limit_chars:
            raise ContextExceeded(
                field,
                self.context_length,
                f"{len(text)} characters cannot fit it",
                f"Send at most {self._limit_chars} characters",
            )
        self._check_beginnings(text, field)
        ids = tuple(self._ids(text, field, add_special_tokens=add_special_tokens))
        if (place := self._first_unknown(ids)) is not None:
            raise Invalid(
                field,
                f"its tokenizer makes {self.tokenizer.id_to_token(ids[place])!r} "
                f"token {ids[place]}, which the model's vocabulary of {self.vocab_size} "
                "does not have",
                "Leave this text out",
            )
        return ids

    def decode(self, ids: Sequence[int], *, field: str) -> str:
        """The text of tokens, special ones included. Raises Invalid, naming `field`."""
        if not self.has_tokenizer:
            raise Invalid(field, f"{self.model} has no tokenizer", "Keep the text of its prompts")
        text: str = self.vocabulary.decode(self._checked(field, ids))
        return text

    def _check_beginnings(self, text: str, field: str) -> None:
        """Raises ContextExceeded if a part of the text is far over the context: what is behind it
        costs no memory."""
        num_chars = max(MIN_BEGINNING, USUAL_CHARS_PER_TOKEN * self.context_length)
        most = 2 * self.context_length
        while num_chars < len(text):
            if len(self._ids(text[:num_chars], field, add_special_tokens=False)) > most:
                raise ContextExceeded(
                    field,
                    self.context_length,
                    f"{len(text)} characters make more than {most}",
                    f"Shorten it to at most {self.longest - 1} tokens",
                )
            num_chars *= 2

    def _ids(self, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        try:
            # Of a batch, as that alone lets other threads run meanwhile.
            (encoding,) = self.tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except TypeError as error:
            raise Invalid(
                field, "it holds characters that are not valid Unicode", "Remove lone surrogates"
            ) from error
        ids: list[int] = encoding.ids
        return ids

    def _checked(self, field: str, ids: Sequence[int]) -> tuple[int, ...]:
        if (place := self._first_unknown(ids)) is not None:
            raise Invalid(
                f"{field}[{place}]",
                f"token id {ids[place]} is not in the vocabulary of {self.vocab_size}",
                f"Use ids from 0 to {self.vocab_size - 1}",
            )
        return tuple(ids)

    def _first_unknown(self, ids: Sequence[int]) -> int | None:
        """The place of the first id that the model has no embedding for."""
        if not ids or (min(ids) >= 0 and max(ids) < self.vocab_size):
            return None
        return next(
            place for place, token_id in enumerate(ids) if not 0 <= token_id < self.vocab_size
        )

    def _max_tokens(self, field: str, num_prompt: int, params: SamplingParams) -> int:
        room = self.longest - num_prompt
        if room < 1:
            raise ContextExceeded(
                field,
                self.longest,
                f"{num_prompt} prompt tokens leave no room in {self._limit}",
                f"Shorten it to at most {self.longest - 1} tokens",
            )
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if max_tokens > room:
            raise ContextExceeded(
                "max_tokens",
                self.longest,
                f"{num_prompt} prompt tokens + {max_tokens} are over {self._limit}",
                f"Use at most {room}, or shorten the prompt",
            )
        if params.min_tokens > max_tokens:
            raise Invalid(
                "min_tokens",
                f"{params.min_tokens} is above the {max_tokens} that fit",
                f"Use at most {max_tokens}",
            )
        return max_tokens

    @property
    def _limit(self) -> str:
        if self.longest == self.context_length:
            return "it"
        return f"what the KV of {self.model}'s pipelines holds of its {self.context_length}"
