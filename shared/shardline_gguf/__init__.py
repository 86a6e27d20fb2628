"""The headers of GGUF files: what they hold, and the configuration of their model."""

from shardline_gguf.gguf_config import (
    FORMAT,
    config_of,
    drafting_layers,
    eos_ids,
    has_mxfp4_experts,
    read_config,
    share_above_4_bits,
)
from shardline_gguf.gguf_files import SUFFIX, files_of, is_gguf, model_in, read_parts, stem_of
from shardline_gguf.gguf_header import IN_4_BITS, Block, GgufHeader, TensorPlace, read_header
from shardline_gguf.refusal import refuse

__all__ = [
    "FORMAT",
    "IN_4_BITS",
    "SUFFIX",
    "Block",
    "GgufHeader",
    "TensorPlace",
    "config_of",
    "drafting_layers",
    "eos_ids",
    "files_of",
    "has_mxfp4_experts",
    "is_gguf",
    "model_in",
    "read_config",
    "read_header",
    "read_parts",
    "refuse",
    "share_above_4_bits",
    "stem_of",
]
