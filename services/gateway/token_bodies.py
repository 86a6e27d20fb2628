"""The bodies of routes that show prompts as a model reads them, in vLLM's and llama.cpp's words.
The API's description is made from these types."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from shardline.contract.chat import Message
from shardline.contract.job import SamplingParams, TokenId, Variable, VariableName
from shardline.contract.request_parsing import check_continuation
from shardline.contract.tool_choice import Tools

ModelName = Annotated[str, Meta(min_length=1, max_length=256)]


class ModelQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something about a model; where only one is registered, it need not be named."""

    model: ModelName | None = None


class ChatQuestion(ModelQuestion, frozen=True, kw_only=True):
    """Something about messages, which the model's chat template renders."""

    messages: Annotated[tuple[Message, ...], Meta(min_length=1)] | None = None
    chat_template_kwargs: Annotated[dict[VariableName, Variable], Meta(max_length=16)] = {}
    tools: Tools = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def params(self) -> SamplingParams:
        """What of a job's parameters changes how messages are rendered. Raises Invalid."""
        params = SamplingParams(
            chat_template_kwargs=self.chat_template_kwargs,
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )
        check_continuation(params)
        return params


class TemplateBody(ChatQuestion, frozen=True, kw_only=True):
    """The body of `POST /apply-template`."""

    messages: Annotated[tuple[Message, ...], Meta(min_length=1)]


class TokenizeBody(ChatQuestion, frozen=True, kw_only=True):
    """The body of `POST /tokenize`: a prompt or messages."""

    prompt: str | None = None
    add_special_tokens: bool | None = None
    """Those that begin or end a text; the default is true for a prompt and false for messages."""
    return_token_strs: bool = False


class DetokenizeBody(ModelQuestion, frozen=True, kw_only=True):
    """The body of `POST /detokenize`."""

    tokens: tuple[TokenId, ...]


class TokenizedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """What `POST /tokenize` answers."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: tuple[str, ...] | None


class PromptText(msgspec.Struct, frozen=True, kw_only=True):
    """What `POST /detokenize` and `POST /apply-template` answer."""

    prompt: str
