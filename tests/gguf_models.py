"""Writes GGUF files for tests, as the converter of llama.cpp does: from a folder of transformers,
with one type for all large weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
import transformers as tf
from gguf import GGMLQuantizationType, GGUFWriter
from torch import Tensor

from tests.gguf_weights import converted_weights

ARCHITECTURES: Final = {
    "llama": "llama",
    "granite": "granite",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "starcoder2": "starcoder2",
    "nemotron": "nemotron",
    "gemma": "gemma",
    "smollm3": "smollm3",
    "ministral3": "mistral3",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "exaone4": "exaone4",
    "glm4": "glm4",
    "seed_oss": "seed_oss",
    "ernie4_5": "ernie4_5",
    "lfm2": "lfm2",
    "gpt_oss": "gpt-oss",
    "gemma4_text": "gemma4",
    "gemma3n_text": "gemma3n",
    "granitemoehybrid": "granitehybrid",
    "glm4_moe": "glm4moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "olmoe": "olmoe",
    "falcon_h1": "falcon-h1",
    "nemotron_h": "nemotron_h",
    "mixtral": "llama",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "hunyuan_v1_dense": "hunyuan-dense",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
"""By model_type."""
RAW_NUMBERS: Final = 256
"""In a block of such a type."""
FACTORS: Final = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


COUNTS: Final = "n_routed_experts", "moe_num_experts", "num_experts", "num_local_experts"
SHARED_WIDTHS: Final = (
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
)
EPSILONS: Final = "norm_epsilon", "norm_eps", "layer_norm_eps"
GLOBAL_HEAD: Final = 32
"""Of Gemma 4's layers that see all."""
HEADS_OF_GEMMA4: Final = {"sliding_attention": 2, "full_attention": 1}
"""Heads of keys, where layers that see all have others."""


def write_gguf(
    folder: Path,
    path: Path,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    raw: GGMLQuantizationType | None = None,
    others: Mapping[str, GGMLQuantizationType] | None = None,
    metadata: Mapping[str, Any] | None = None,
    part_tensors: int = 0,
) -> Path:
    """Writes the model of a folder; returns the file, or with `part_tensors` the first of several
    that hold so many tensors each. `raw` is a type that is only read: its blocks are drawn.
    `others` are types instead of `kind`, by the last part of names in the file."""
    config = tf.AutoConfig.from_pretrained(folder)
    model = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config.allow_global_per_layer_attribute_access = True
    name = ARCHITECTURES[config.model_type]
    if name == "nemotron_h" and "moe" in config.layer_types:
        name = "nemotron_h_moe"
    writer = GGUFWriter(path, name, split_max_tensors=part_tensors)
    _add_config(writer, config, name)
    if (folder / "tokenizer.json").is_file():
        _add_tokenizer(writer, folder)
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, _type_of(value))
    names = gguf.get_tensor_name_map(_architecture(name), config.num_hidden_layers)
    for name_of_weight, weight in converted_weights(model, name).items():
        found = names.get_name(name_of_weight, try_suffixes=(".weight", ".bias"))
        if found is None and name_of_weight.startswith("blk."):
            found = name_of_weight
        assert found is not None, name_of_weight
        if raw is not None and weight.dim() > 1 and not weight.shape[-1] % RAW_NUMBERS:
            _add_drawn(writer, found, weight, raw)
        else:
            _add(writer, found, weight, (others or {}).get(found.split(".")[-2], kind))
    _add_factors(writer, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not part_tensors else min(path.parent.glob(f"{path.stem}-00001-of-*"))


def _add(writer: GGUFWriter, name: str, weight: Tensor, kind: GGMLQuantizationType) -> None:
    numbers = weight.contiguous().numpy()
    is_float = weight.dim() < 2 or name.endswith(".bias")
    if is_float or weight.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        writer.add_tensor(name, numbers)
    else:
        writer.add_tensor(name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)


def _add_drawn(writer: GGUFWriter, name: str, weight: Tensor, kind: GGMLQuantizationType) -> None:
    """Adds blocks of drawn bytes. Each is small enough for the scales in it to be finite."""
    num_numbers, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = (weight.shape[0], weight.shape[1] // num_numbers * num_bytes)
    blocks = np.random.default_rng(len(name)).integers(0, 60, shape, dtype=np.uint8)
    writer.add_tensor(name, blocks, raw_dtype=kind)


def _add_config(writer: GGUFWriter, config: Any, name: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    _add_layer_types(writer, config)
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    if config.model_type == "lfm2":
        writer.add_layer_norm_rms_eps(config.norm_eps)
    elif config.model_type == "nemotron_h":
        writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    elif hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        field = next(each for each in EPSILONS if hasattr(config, each))
        writer.add_layer_norm_eps(getattr(config, field))
    for field, key in FACTORS.items():
        if getattr(config, field, None) and config.model_type != "falcon_h1":
            writer.add_float32(f"{name}.{key}", getattr(config, field))
    _add_experts(writer, config)
    _add_states(writer, config)
    if config.model_type != "gemma4_text":
        writer.add_key_length(head_dim)
        if config.model_type != "nemotron_h":
            _add_rope(writer, config, head_dim)


def _add_rope(writer: GGUFWriter, config: Any, head_dim: int) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * (rope.get("partial_rotary_factor") or 1)))
    kind = rope.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("original_max_position_embeddings"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    for beta, add in (
        ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
        ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
    ):
        if rope.get(beta):
            add(rope[beta])


def _add_experts(writer: GGUFWriter, config: Any) -> None:
    if config.model_type == "nemotron_h":
        if "moe" not in config.layer_types:
            return
        writer.add_expert_group_count(config.n_group)
    for add, fields in (
        (writer.add_expert_count, COUNTS),
        (writer.add_expert_used_count, ("moe_k", "num_experts_per_tok")),
        (writer.add_expert_feed_forward_length, ("moe_intermediate_size",)),
        (writer.add_expert_shared_count, ("moe_num_shared_experts", "n_shared_experts")),
        (
            writer.add_expert_shared_feed_forward_length,
            SHARED_WIDTHS,
        ),
        (writer.add_interleave_moe_layer_step, ("moe_layer_interval",)),
        (writer.add_leading_dense_block_count, ("moe_layer_start_index", "first_k_dense_replace")),
        (writer.add_expert_weights_scale, ("routed_scaling_factor",)),
    ):
        found = [getattr(config, field) for field in fields if getattr(config, field, None)]
        if found:
            add(found[0])
    if config.model_type == "gpt_oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if config.model_type in ("glm4_moe", "nemotron_h"):
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if config.model_type == "glm4_moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_states(writer: GGUFWriter, config: Any) -> None:
    """Adds sizes of layers that keep a state."""
    if hasattr(config, "linear_num_key_heads"):
        heads = config.linear_num_value_heads
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_inner_size(heads * config.linear_value_head_dim)
        writer.add_full_attention_interval(4)
    if hasattr(config, "mamba_d_conv"):
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_group_count(config.mamba_n_groups)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
        writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
    if config.model_type == "granitemoehybrid":
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    if config.model_type == "nemotron_h":
        writer.add_ssm_conv_kernel(config.conv_kernel)
        writer.add_ssm_state_size(config.ssm_state_size)
        writer.add_ssm_group_count(config.n_groups)
        writer.add_ssm_time_step_rank(config.mamba_num_heads)
        writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
        writer.add_rope_scaling_finetuned(False)
    if config.model_type.startswith("qwen3_5"):
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def _add_layer_types(writer: GGUFWriter, config: Any) -> None:
    """Adds sizes that only some layers have."""
    if config.model_type == "lfm2":
        heads = config.num_key_value_heads
        writer.add_head_count_kv([heads if kind != "conv" else 0 for kind in config.layer_types])
        writer.add_shortconv_l_cache(config.conv_L_cache)
        multiple = config.block_multiple_of
        width = -(-int(2 * config.intermediate_size / 3) // multiple) * multiple
        writer.add_feed_forward_length(width)
        return
    if config.model_type == "gemma4_text":
        _add_gemma4(writer, config)
        return
    heads = config.num_key_value_heads
    if config.model_type in ("granitemoehybrid", "nemotron_h"):
        heads = [heads if kind == "full_attention" else 0 for kind in config.layer_types]
    writer.add_head_count_kv(heads)
    if config.model_type == "nemotron_h":
        width = config.intermediate_size
        widths = [width if kind == "mlp" else 0 for kind in config.layer_types]
        writer.add_feed_forward_length(widths)
    elif config.model_type == "gemma3n_text":
        _add_gemma3n(writer, config)
    elif getattr(config, "intermediate_size", None):
        writer.add_feed_forward_length(config.intermediate_size)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
        if config.model_type in ("olmo3", "exaone4", "gemma3n_text"):
            pattern = [kind == "sliding_attention" for kind in config.layer_types]
            writer.add_sliding_window_pattern(pattern)


def _add_gemma3n(writer: GGUFWriter, config: Any) -> None:
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    shares = torch.tensor(config.activation_sparsity_pattern)
    deviations = torch.distributions.Normal(0, 1).icdf(shares)
    writer.add_activation_sparsity_scale(deviations.tolist())


def _add_gemma4(writer: GGUFWriter, config: Any) -> None:
    kinds, shared = config.layer_types, config.num_kv_shared_layers
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    writer.add_key_length(GLOBAL_HEAD)
    writer.add_value_length(GLOBAL_HEAD)
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    width, own = config.intermediate_size, len(kinds) - shared
    last = 2 * width if config.use_double_wide_mlp else width
    writer.add_feed_forward_length([width] * own + [last] * shared)
    heads = config.num_key_value_heads
    writer.add_head_count_kv(
        [HEADS_OF_GEMMA4[kind] for kind in kinds] if config.attention_k_eq_v else heads
    )
    writer.add_rope_dimension_count(GLOBAL_HEAD)
    writer.add_rope_dimension_count_swa(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _add_factors(writer: GGUFWriter, config: Any) -> None:
    if config.model_type == "nemotron_h":
        return
    rope = config.rope_parameters
    if config.model_type == "gemma4_text":
        rotated = int(GLOBAL_HEAD / 2 * rope["full_attention"]["partial_rotary_factor"])
        values = [1.0] * rotated + [1e30] * (GLOBAL_HEAD // 2 - rotated)
        writer.add_tensor("rope_freqs.weight", np.array(values, dtype=np.float32))
    if rope.get("rope_type") == "longrope":
        for name in ("long", "short"):
            factors = np.array(rope[f"{name}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config).numpy())


def _llama3_factors(config: Any) -> Tensor:
    """Each frequency of the plain rope over that of the scaled one."""
    functions: Mapping[str, Callable[..., Any]] = tf.modeling_rope_utils.ROPE_INIT_FUNCTIONS
    scaled, _ = functions["llama3"](config, torch.device("cpu"))
    steps = torch.arange(0, 2 * len(scaled), 2, dtype=torch.float32) / (2 * len(scaled))
    plain = 1.0 / config.rope_parameters["rope_theta"] ** steps
    return (plain / scaled).to(torch.float32)


def _add_tokenizer(writer: GGUFWriter, folder: Path) -> None:
    """A byte-level vocabulary, cut as `tokenizer.ggml.pre` says; none for one of another kind."""
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model = document["model"]
    if model["type"] != "BPE":
        writer.add_tokenizer_model("no_vocab")
        return
    added = {token["content"]: token for token in document["added_tokens"]}
    ids = model["vocab"] | {token["content"]: token["id"] for token in document["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    kinds = [
        3 if added.get(token, {}).get("special") else 4 if token in added else 1 for token in tokens
    ]
    writer.add_token_types(kinds)
    pairs = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    writer.add_token_merges(pairs)
    if document["post_processor"] and document["post_processor"]["type"] == "TemplateProcessing":
        writer.add_add_bos_token(True)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = folder / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text(encoding="utf-8"))
    for name, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("unk_token", writer.add_unk_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        token = config.get(name)
        token = token["content"] if isinstance(token, dict) else token
        if token is not None:
            add(ids[token])


def _architecture(name: str) -> gguf.MODEL_ARCH:
    return next(kind for kind, value in gguf.MODEL_ARCH_NAMES.items() if value == name)


def _type_of(value: Any) -> gguf.GGUFValueType:
    return gguf.GGUFValueType.get_type(value)
