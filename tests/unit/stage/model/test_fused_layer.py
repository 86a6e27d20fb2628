"""Whole layers as one call: only where every bit stays, whatever rows a step has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf
from torch import Tensor

from services.stage.attention.attention import Attention, PagedKv, Span
from services.stage.engine.forward import Forward
from services.stage.engine.loading import fuse_on_cores, pack_shard
from services.stage.kernels.kernel import Kernel, Weights, load
from services.stage.model.kv_shapes import probe_kv_shapes
from services.stage.model.shard import Shard
from services.stage.products.packing import packing_for
from services.stage.products.row_buckets import RowPadding
from services.stage.recurrent.states import RecurrentStates
from shardline.base.errors import ProtocolError
from tests.encoders import SHARED, save_encoder
from tests.models import save_drawn, save_model

NUM_LAYERS = 4
PROMPT = Span(start=0, length=70, blocks=[0, 1], state=0)
BESIDE = Span(start=0, length=9, blocks=[2], state=1)
NEXT = Span(start=70, length=1, blocks=[0, 1], state=0)
FUSED = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "seed-oss"), NUM_LAYERS),
    "gemma": NUM_LAYERS,  # another activation
    "gemma2": NUM_LAYERS,  # four norms, capped scores
    "gemma3": NUM_LAYERS,  # four norms and those of heads
    "granite": NUM_LAYERS,  # a scaled residual
    "granite-4-dense": NUM_LAYERS,
    "olmo2": NUM_LAYERS,  # norms behind attention and MLP and of all heads, tables in float32
    "olmo3": NUM_LAYERS,
    "exaone4": NUM_LAYERS,
    "hunyuan-dense": NUM_LAYERS,  # norms of heads that are turned
    "smollm3": NUM_LAYERS,  # every fourth layer turns nothing
    "phi3": NUM_LAYERS,  # products that the model itself merged
    "glm4": NUM_LAYERS,  # turns neighbors, and half of a head
    "ernie4.5": NUM_LAYERS,  # turns neighbors by tables in float32
    "lfm2": 1,  # other names
    "granitemoehybrid": 1,
    "qwen3.5": 0,  # gates what it attended
    "olmo-hybrid": 2,
    "ministral3": 0,  # scales queries at late positions
    "cohere2": 0,  # LayerNorm, attention beside the MLP
    "starcoder2": 0,  # LayerNorm
    "mixtral": 0,  # experts
}
"""How many layers of each model are one call."""
BEHIND_MIXERS = {
    "lfm2": 3,
    "granitemoehybrid": 3,
    "qwen3.5": NUM_LAYERS,
    "olmo-hybrid": 2,
    "ministral3": NUM_LAYERS,
}
"""Layers of which all that follows the part that mixes tokens is one call."""
FUSED_ENCODERS = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra"), NUM_LAYERS),
    "mpnet": 0,  # scores by distance
    "modernbert": 0,  # norms before attention and MLP
    "gte": 0,  # rotary positions
}


def kernel() -> Kernel:
    """Of this processor."""
    found = load()
    assert found is not None
    return found


def forward_of(
    folder: Path,
    dtype: torch.dtype,
    integers: Weights | None = None,
    *,
    both_ways: bool = False,
) -> Forward:
    """A whole model in one shard, packed, its elementwise parts fused, its layers not."""
    native = kernel()
    cpu = torch.device("cpu")
    attention = Attention(native, both_ways=both_ways)
    packing = packing_for(dtype, native, integers)
    shard = Shard.load(
        folder, range(NUM_LAYERS), dtype=dtype, attn_implementation=attention.name, device=cpu
    )
    pack_shard(shard, packing)
    kv = PagedKv(layers=probe_kv_shapes(shard), num_blocks=3, dtype=dtype)
    shard.recurrence.kernel = native
    fuse_on_cores(shard.model, native)
    states = RecurrentStates(shard.recurrence.shapes, num_slots=2)
    return Forward(shard, attention, kv, RowPadding(buckets=frozenset()), states)


def ids(spans: list[Span]) -> Tensor:
    """One for each packed row."""
    return torch.tensor(
        [3 + (7 * at) % 90 for span in spans for at in range(span.start, span.start + span.length)]
    )


def outputs(forward: Forward) -> list[Tensor]:
    """Of all rows of two prompts, of their last rows, and of the row after a prompt that was
    written only."""
    spans = [PROMPT, BESIDE]
    last = [PROMPT.length - 1, PROMPT.length + BESIDE.length - 1]
    every = forward.sampled_outputs(spans, ids(spans), list(range(PROMPT.length + BESIDE.length)))
    narrowed = forward.sampled_outputs(spans, ids(spans), last)
    for store in (*forward.kv.keys.values(), *forward.kv.values.values()):
        store.zero_()
    forward.write([PROMPT], ids([PROMPT]))
    return [every, narrowed, forward.sampled_outputs([NEXT], ids([NEXT]), [0])]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", FUSED)
@torch.inference_mode()
def test_layers_as_one_call_give_every_bit_of_their_modules(
    name: str, dtype: str, tmp_path: Path
) -> None:
    # Given a model made of modules
    integers = {"int8": Weights.INT8, "int4": Weights.INT4}.get(dtype)
    stored = torch.float32 if dtype == "float32" else torch.bfloat16
    forward = forward_of(save_model(tmp_path, name), stored, integers)
    expected = outputs(forward)

    # When the layers that can be are one call each
    num_fused = forward.fuse_layers(kernel())

    # Then they are those that we know, and nothing changes
    assert num_fused == FUSED[name]
    layers = forward.shard.layer_modules.values()
    assert sum("forward" in vars(layer) for layer in layers) - num_fused == BEHIND_MIXERS.get(
        name, 0
    )
    assert all(torch.equal(got, one) for got, one in zip(outputs(forward), expected, strict=True))


@pytest.mark.parametrize(("name", "num_rows"), [("gemma3", 1), ("qwen3.5", 2), ("cohere2", 2)])
@torch.inference_mode()
def test_rows_are_padded_for_what_torch_computes_between_products(
    name: str, num_rows: int, tmp_path: Path
) -> None:
    forward = forward_of(save_model(tmp_path, name), torch.bfloat16)
    forward.padding = RowPadding(buckets=frozenset(), widths=frozenset({32}))

    forward.fuse_layers(kernel())

    assert forward.padding.padded(1) == num_rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", FUSED_ENCODERS)
@torch.inference_mode()
def test_an_encoders_layers_as_one_call_give_every_bit_of_their_modules(
    name: str, dtype: str, tmp_path: Path
) -> None:
    integers = {"int8": Weights.INT8, "int4": Weights.INT4}.get(dtype)
    stored = torch.float32 if dtype == "float32" else torch.bfloat16
    forward = forward_of(save_encoder(tmp_path, name), stored, integers, both_ways=True)
    texts = [PROMPT, BESIDE]
    expected = forward.hidden(texts, ids(texts))

    num_fused = forward.fuse_layers(kernel())

    assert num_fused == FUSED_ENCODERS[name]
    assert torch.equal(forward.hidden(texts, ids(texts)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_a_decoder_of_such_layers_writes_keys_alone(dtype: torch.dtype, tmp_path: Path) -> None:
    config = tf.BertConfig(**SHARED, is_decoder=True)
    path = save_drawn(tmp_path / "bert", lambda: tf.AutoModelForCausalLM.from_config(config))
    forward = forward_of(path, dtype)
    expected = outputs(forward)

    assert forward.fuse_layers(kernel()) == NUM_LAYERS
    assert all(torch.equal(got, one) for got, one in zip(outputs(forward), expected, strict=True))


@torch.inference_mode()
def test_a_last_layer_that_depends_on_late_positions_computes_every_row(tmp_path: Path) -> None:
    # Given a last layer that adds to rows far behind, by positions which narrowing does not narrow
    attention = Attention(kernel())
    path = save_model(tmp_path)
    layers = range(NUM_LAYERS)
    cpu = torch.device("cpu")
    shard = Shard.load(
        path, layers, dtype=torch.float32, attn_implementation=attention.name, device=cpu
    )
    position: list[Tensor] = []
    shard.decoder.register_forward_pre_hook(
        lambda *call: position.append(call[2]["position_ids"]), with_kwargs=True
    )
    shard.layer_modules[NUM_LAYERS - 1].register_forward_hook(
        lambda _layer, _args, out: out + 5 * (position[-1][:, : out.shape[1], None] > 200)
    )
    kv = PagedKv(layers=probe_kv_shapes(shard), num_blocks=5, dtype=torch.float32)
    forward = Forward(shard, attention, kv, RowPadding(buckets=frozenset()))

    # When the last of some rows is sampled
    late = [Span(start=150, length=100, blocks=[0, 1, 2, 3])]
    every = forward.sampled_outputs(late, ids(late), list(range(100)))

    # Then it is what it is among all of them
    torch.testing.assert_close(forward.sampled_outputs(late, ids(late), [99]), every[99:])


@torch.inference_mode()
def test_rows_outside_the_kv_are_refused_by_name(tmp_path: Path) -> None:
    decoder = forward_of(save_model(tmp_path), torch.float32)
    encoder = forward_of(save_encoder(tmp_path, "bert"), torch.float32, both_ways=True)
    for forward in (decoder, encoder):
        assert forward.fuse_layers(kernel()) == NUM_LAYERS
        outside = Span(start=0, length=2, blocks=[3])
        with pytest.raises(ProtocolError, match="lies outside the block table"):
            forward.hidden([outside], ids([outside]))
