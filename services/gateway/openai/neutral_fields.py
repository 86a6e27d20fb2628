"""Fields of other servers that Shardline does not have, and the values of each that change nothing.

OpenAI's, and those that clients of vLLM, SGLang and llama.cpp send with every request. A hint is
taken where no answer would be another one for it. What would be silently wrong is refused by name.
Knows no field of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from shardline.base.errors import Invalid
from shardline.contract.request_parsing import MAX_SHOWN_CHARS

OFF = (False,)
ON = (True,)
ANY_TEXT = "any text"
ANY_OBJECT = "any object"
ANY_NUMBER = "any number"
"""Of a setting with its switch off."""

COMMON_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # OpenAI's.
    "best_of": (1,),
    "prompt_cache_retention": ("in-memory", "in_memory", "24h"),
    "prompt_cache_options": (ANY_OBJECT,),  # equal beginnings are found without being marked
    "user": (ANY_TEXT,),
    "safety_identifier": (ANY_TEXT,),
    "prompt_cache_key": (ANY_TEXT,),
    # vLLM's and SGLang's.
    "spaces_between_special_tokens": ON,
    "no_stop_trim": OFF,
    "return_tokens_as_token_ids": OFF,
    "return_hidden_states": OFF,
    "use_beam_search": OFF,
    "early_stopping": OFF,
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "vllm_xargs": ({},),
    "stop_regex": ([], ""),
    "session_id": (ANY_TEXT,),
    "truncation_side": ("left",),
    "watermarking": OFF,
    "stream_interval": (1,),
    "logprob_token_ids": ([],),
    "return_prompt_text": OFF,
    "return_token_offsets": OFF,
    "return_weight_versions": OFF,
    "separate_reasoning": ON,
    "stream_reasoning": ON,
    # llama.cpp's.
    "cache_prompt": (True, False),
    "id_slot": (-1,),
    "n_probs": (0,),
    "repeat_penalty": (1.0,),
    "repeat_last_n": (ANY_NUMBER,),
    "typical_p": (1.0,),
    "typ_p": (1.0,),
    "top_n_sigma": (-1.0,),
    "dynatemp_range": (0.0,),
    "dynatemp_exponent": (ANY_NUMBER,),
    "xtc_probability": (0.0,),
    "xtc_threshold": (ANY_NUMBER,),
    "dry_multiplier": (0.0,),
    "dry_base": (ANY_NUMBER,),
    "dry_allowed_length": (ANY_NUMBER,),
    "dry_penalty_last_n": (ANY_NUMBER,),
    "mirostat": (0,),
    "mirostat_tau": (ANY_NUMBER,),
    "mirostat_eta": (ANY_NUMBER,),
    "min_keep": (0,),
    "grammar": ("",),
    "lora": ([],),
    "response_fields": ([],),
    "reasoning_format": ("auto", "deepseek"),
    "parse_tool_calls": ON,
    "post_sampling_probs": OFF,
    "timings_per_token": OFF,
    "return_progress": OFF,
    "return_tokens": OFF,
}
COMPLETION_NEUTRAL = {
    **COMMON_NEUTRAL,
    "store": (False, True),  # every job is kept and found under /v1/jobs
    "suffix": ("",),
}
CHAT_NEUTRAL = {
    **COMMON_NEUTRAL,
    "echo": OFF,
    "modalities": (["text"],),
    "audio": (),
    "prediction": (ANY_OBJECT,),  # of the answer, which is the same without it
    "web_search_options": (),
    "verbosity": ("medium",),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
}
STREAM_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"include_obfuscation": (*OFF, *ON)}
ECHOED = frozenset(
    (
        *("parsed", "id", "opts", "metadata", "cache_control"),
        *("provider_specific_fields", "thinking_blocks", "reasoning_details"),
    )
)
"""Fields that clients add to messages and tools for themselves or for other servers, and send back:
OpenAI's `parse`, LiteLLM, agents in editors."""
MESSAGE_TYPES = ("message", "text")
"""What some write as the `type` of a message."""


def drop_neutral(
    fields: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]], prefix: str = ""
) -> None:
    """Take these fields out of a body. Raises Invalid for a value that would change the answer."""
    for name in [name for name in fields if name in neutral]:
        value = fields.pop(name)
        values = neutral[name]
        if not _is_one_of(value, values) and not _is_any(value, values):
            raise Invalid(prefix + name, f"{_short(value)} is not supported", _remedy(values))


def without_echoes(objects: object) -> object:
    """Returns messages or tools without ECHOED; what is none stays, to be refused."""
    if not isinstance(objects, list):
        return objects
    return [
        {
            name: value
            for name, value in one.items()
            if name not in ECHOED and not _is_type(one, name)
        }
        if isinstance(one, dict)
        else one
        for one in objects
    ]


def _is_type(one: dict[str, Any], name: str) -> bool:
    return name == "type" and "role" in one and one[name] in MESSAGE_TYPES


def _is_any(value: Any, values: tuple[Any, ...]) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (
        (ANY_TEXT in values and isinstance(value, str))
        or (ANY_OBJECT in values and isinstance(value, dict))
        or (ANY_NUMBER in values and is_number)
    )


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """JSON has one kind of number: 1.0 is 1. And true is none."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def _remedy(values: tuple[Any, ...]) -> str:
    allowed = " or ".join(
        one if one in (ANY_TEXT, ANY_OBJECT, ANY_NUMBER) else msgspec.json.encode(one).decode()
        for one in values
    )
    return f"Leave it out, or send {allowed}" if allowed else "Leave it out"


def _short(value: Any) -> str:
    """The beginning of it as JSON, for an error; only the kind of what may be nested deeper than
    encoders go."""
    if isinstance(value, dict | list) and value:
        return "an object" if isinstance(value, dict) else "a list"
    return msgspec.json.encode(value).decode()[:MAX_SHOWN_CHARS]
