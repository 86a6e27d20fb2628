"""Writes a Llama checkpoint as GGUF: `to_gguf.py FOLDER OUT bf16|q8_0`. Runs in llama.cpp's
environment.

Its vocabulary is one word per id: prompts go in as ids, and the server only needs some text for
each answer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
CONTROL = 3
NORMAL = 1
"""Kinds of tokens."""


def main() -> None:
    """Converts one checkpoint."""
    folder = Path(sys.argv[1])
    out = sys.argv[2]
    kind = sys.argv[3]
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(out, "llama")
    describe(writer, config)
    stored = {"bf16": gguf.GGMLQuantizationType.BF16, "q8_0": gguf.GGMLQuantizationType.Q8_0}[kind]
    writer.add_file_type(
        {"bf16": gguf.LlamaFileType.MOSTLY_BF16, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}[kind]
    )
    for name, values in tensors(folder / "model.safetensors"):
        rows = interleaved(name, values, config)
        if rows.ndim == 1:
            writer.add_tensor(gguf_name(name), rows)
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(rows, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe(writer: Any, config: dict[str, Any]) -> None:
    """Sizes and vocabulary."""
    size = config["vocab_size"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{number}>" for number in range(size)])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([CONTROL if number < 3 else NORMAL for number in range(size)])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Names and float32 values of a safetensors file; bfloat16 is widened."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8:start]).items():
        if name == "__metadata__":
            continue
        begin, end = (start + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            halves = np.frombuffer(raw[begin:end], np.uint16).astype(np.uint32) << np.uint32(16)
            values = halves.view(np.float32)
        else:
            values = np.frombuffer(raw[begin:end], np.float32)
        yield name, values.reshape(entry["shape"])


def interleaved(name: str, values: Any, config: dict[str, Any]) -> Any:
    """Query and key rows in the order that llama.cpp rotates: pairs side by side, not half a head
    apart."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    count = heads.get(name.split(".")[-2])
    if count is None:
        return values
    return np.ascontiguousarray(
        values.reshape(count, 2, values.shape[0] // count // 2, values.shape[1])
        .swapaxes(1, 2)
        .reshape(values.shape)
    )


def gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` is `blk.3.ffn_up.weight`."""
    stem = name.removesuffix(".weight")
    if stem in TOP:
        return f"{TOP[stem]}.weight"
    number, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{number}.{NAMES[part]}.weight"


if __name__ == "__main__":
    main()
