"""Texts and pairs of texts as the ids that an encoder reads whole. Owns what a request to an
encoder may contain; knows no database."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Encoding, Tokenizer

from shardline.base.errors import ContextExceeded, Invalid
from shardline.contract.encoders.encoder import GENERATE, Encoder, EncoderTask
from shardline.contract.job import ALL_THAT_FIT, Prompt, SamplingParams
from shardline_server.tokenize.prepared_prompt import PreparedPrompt

OF_ENCODERS = ("document", "dimensions", "prompt_name")
"""Fields that mean nothing to a model that generates text."""

TAKEN = frozenset(
    {*OF_ENCODERS, "add_special_tokens", "truncate_prompt_tokens", "seed", "exact", "adapter"}
)
"""Parameters that a request to an encoder may have: the others choose tokens."""

MAX_CHARS_PER_TOKEN = 128
"""Of a text that may be cut: no tokenizer in use has longer tokens."""

PRODUCTS = {EncoderTask.EMBED: "embeddings", EncoderTask.SCORE: "scores of pairs"}


def check_generates(model: str, params: SamplingParams) -> None:
    """Raises Invalid for what only encoders take."""
    for name in OF_ENCODERS:
        if getattr(params, name) is not None:
            problem = f"{model} generates text (its task is {GENERATE})"
            raise Invalid(name, problem, "Leave it out, or ask an encoder of GET /v1/models")


def check_task(model: str, encoder: Encoder | None, task: EncoderTask | None) -> None:
    """Raises Invalid if a model is asked for another task than its own; None: to generate."""
    own = None if encoder is None else encoder.task
    if own is task:
        return
    does = "generates text" if own is None else f"makes {PRODUCTS[own]}"
    wanted = "text" if task is None else PRODUCTS[task]
    problem = f"{model} {does} (its task is {own or GENERATE}), and is asked for {wanted}"
    raise Invalid("model", problem, "Name one of GET /v1/models with that task")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderTexts:
    """Prepares the texts of one encoder, by its tokenizer."""

    model: str
    encoder: Encoder
    tokenizer: Tokenizer | None
    longest: int
    """Tokens, special ones included."""
    vocab_size: int

    def prepare(
        self, prompt: Prompt | None, params: SamplingParams, *, is_chat: bool
    ) -> PreparedPrompt:
        """Token ids within every limit of the model. Raises Invalid, naming the field, the limit
        and the remedy."""
        self._check_fields(params, is_chat=is_chat)
        if not prompt:
            problem = "it is empty; at least one token is needed"
            raise Invalid("prompt", problem, "Send some text or token ids")
        if isinstance(prompt, str):
            ids = self._ids_of_text(prompt, params)
        elif self.encoder.task is EncoderTask.SCORE:
            problem = "token ids do not tell the texts of a pair apart"
            raise Invalid("prompt", problem, "Send two texts, as prompt and document")
        else:
            ids = self._checked(prompt, params)
        return PreparedPrompt(prompt_ids=ids, max_tokens=1)

    def _check_fields(self, params: SamplingParams, *, is_chat: bool) -> None:
        usual = SamplingParams(max_tokens=1 if params.max_tokens == 1 else None)
        makes = (
            f"{self.model} makes {PRODUCTS[self.encoder.task]} (its task is {self.encoder.task})"
        )
        if is_chat:
            raise Invalid("messages", f"{makes}, and takes no chat", "Send a prompt")
        for name in params.__struct_fields__:
            if name not in TAKEN and getattr(params, name) != getattr(usual, name):
                raise Invalid(name, f"{makes}, and generates no text", "Leave it out")
        if params.truncate_prompt_tokens == 0:
            remedy = "Send how many of the first tokens to keep, or -1 for all that fit"
            raise Invalid("truncate_prompt_tokens", "it is 0: nothing would be left", remedy)
        if self.encoder.task is EncoderTask.SCORE:
            for name in ("dimensions", "prompt_name"):
                if getattr(params, name) is not None:
                    raise Invalid(name, f"{makes}, which have none", "Leave it out")
            return
        if params.document is not None:
            raise Invalid(
                "document", f"{makes} of one text", "Leave it out, or ask a cross-encoder"
            )
        if params.dimensions is not None:
            self.encoder.check_dimensions(params.dimensions)

    def _ids_of_text(self, prompt: str, params: SamplingParams) -> tuple[int, ...]:
        with_special = params.add_special_tokens is not False
        if self.encoder.task is EncoderTask.EMBED:
            text = self._with_prompt(prompt, params.prompt_name)
            return self._fitted(self._encoding(text, "prompt", params), None, params, with_special)
        if params.document is None:
            problem = f"{self.model} scores pairs of texts, and one text came alone"
            raise Invalid("document", problem, "Send the second text")
        query = self._encoding(prompt, "prompt", params)
        document = self._encoding(params.document, "document", params)
        if self.encoder.separator is not None and self.encoder.separator in query.ids:
            problem = "it holds the token that separates the texts of a pair"
            raise Invalid("prompt", problem, "Leave that text out")
        return self._fitted(query, document, params, with_special)

    def _with_prompt(self, text: str, name: str | None) -> str:
        encoder = self.encoder
        if name is not None and name not in encoder.prompts:
            known = ", ".join(sorted(encoder.prompts))
            remedy = f"Use one of {known}" if known else "Leave it out"
            raise Invalid("prompt_name", f"{self.model} has no prompt of this name", remedy)
        chosen = encoder.default_prompt if name is None else name
        whole = text if chosen is None else encoder.prompts[chosen] + text
        return whole.lower() if encoder.lowercases else whole

    def _encoding(self, text: str, field: str, params: SamplingParams) -> Encoding:
        if self.tokenizer is None:
            problem = f"{self.model} has no tokenizer"
            raise Invalid(field, problem, "Send the prompt as a list of token ids")
        most = self.longest * MAX_CHARS_PER_TOKEN
        if len(text) > most:
            if params.truncate_prompt_tokens is None:
                raise self._too_long(field, f"{len(text)} characters cannot fit it")
            text = text[:most]
        try:
            # Of a batch, as that alone lets other threads run meanwhile.
            (encoding,) = self.tokenizer.encode_batch([text], add_special_tokens=False)
        except TypeError as error:
            problem = "it holds characters that are not valid Unicode"
            raise Invalid(field, problem, "Remove lone surrogates") from error
        return encoding

    def _fitted(
        self,
        first: Encoding,
        second: Encoding | None,
        params: SamplingParams,
        with_special: bool,
    ) -> tuple[int, ...]:
        """The ids of one text or of a pair, cut where the request lets them be."""
        assert self.tokenizer is not None
        is_pair = second is not None
        num_special = self.tokenizer.num_special_tokens_to_add(is_pair) if with_special else 0
        num_all = len(first.ids) + (len(second.ids) if second else 0) + num_special
        limit = self._limit(params)
        if num_all > limit:
            if params.truncate_prompt_tokens is None:
                raise self._too_long("document" if is_pair else "prompt", f"{num_all} tokens came")
            self._cut(first, second, max(limit - num_special, 1))
        whole = self.tokenizer.post_process(first, second, add_special_tokens=with_special)
        ids: list[int] = whole.ids
        return self._known(ids)

    @staticmethod
    def _cut(first: Encoding, second: Encoding | None, room: int) -> None:
        """Keeps the first tokens; of a pair's longer text fewer, as other libraries do."""
        if second is None:
            first.truncate(room)
            return
        shorter, longer = sorted((first, second), key=lambda each: len(each.ids))
        num_shorter = min(len(shorter.ids), room // 2)
        shorter.truncate(num_shorter)
        longer.truncate(room - num_shorter)

    def _limit(self, params: SamplingParams) -> int:
        asked = params.truncate_prompt_tokens
        return self.longest if asked in (None, ALL_THAT_FIT) else min(asked, self.longest)

    def _checked(self, ids: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
        for name in ("document", "prompt_name"):
            if getattr(params, name) is not None:
                problem = "token ids are read as they are"
                raise Invalid(name, problem, "Send the prompt as text, or leave it out")
        if len(ids) > (limit := self._limit(params)):
            if params.truncate_prompt_tokens is None:
                raise self._too_long("prompt", f"{len(ids)} tokens came")
            ids = ids[:limit]
        return self._known(ids)

    def _known(self, ids: list[int] | tuple[int, ...]) -> tuple[int, ...]:
        for place, token_id in enumerate(ids):
            if not 0 <= token_id < self.vocab_size:
                problem = f"token id {token_id} is not in the vocabulary of {self.vocab_size}"
                remedy = f"Use ids from 0 to {self.vocab_size - 1}"
                raise Invalid(f"prompt[{place}]", problem, remedy)
        return tuple(ids)

    def _too_long(self, field: str, problem: str) -> ContextExceeded:
        remedy = "Shorten it, or send truncate_prompt_tokens -1 to leave out what does not fit"
        return ContextExceeded(field, self.longest, problem, remedy)
