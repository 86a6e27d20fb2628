"""Attention against a float64 reference: heads, windows, softcap, sinks, head sizes, dtypes, any
chunking."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from services.stage.attention.attention import Attention, KvShape, MicroBatch, PagedKv, Span
from services.stage.attention.paged_kv import VECTOR_WIDTH, DistanceBias
from services.stage.kernels.kernel import Kernel
from shardline.base.errors import ProtocolError
from tests.unit.stage.attention.attending import Case, attend, bounds, kernels, reference

KERNELS = kernels()
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

options = st.fixed_dictionaries(
    {},
    optional={
        "softcap": st.sampled_from([2.0, 50.0]),
        "scaling": st.sampled_from([0.05, 0.3]),
    },
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any layer that a causal language model may have, small."""
    case = Case(
        lengths=draw(st.lists(st.integers(1, 140), min_size=1, max_size=3)),
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 4, 7, 12])),
        head_dim=draw(st.sampled_from([20, 64, 80, 96, 128, 256])),
        value_dim=draw(st.sampled_from([None, None, 24])),
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        options=draw(options) | draw(bounds()),
        seed=draw(st.integers(0, 99)),
    )
    if draw(st.booleans()):
        case.options["s_aux"] = torch.linspace(-2, 2, case.num_kv_heads * case.group).to(case.dtype)
    return case


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small work: more threads would only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


chunkings = st.lists(st.integers(1, 70), min_size=1, max_size=4)


@pytest.mark.parametrize(
    "kernel", [*KERNELS, None], ids=[*(kernel.isa for kernel in KERNELS), "sdpa"]
)
@settings(max_examples=20)
@given(case=cases(), chunks=chunkings)
def test_any_layer_in_any_chunks_matches_the_reference(
    kernel: Kernel | None, case: Case, chunks: list[int]
) -> None:
    # When its rows are fed chunk by chunk, decode and prefill mixed
    outputs = attend(kernel, case, chunks, min_rows=2)

    # Then every row is what the textbook says, within the rounding of its dtype
    for output, expected in zip(outputs, reference(case), strict=True):
        assert output.dtype == case.dtype
        torch.testing.assert_close(
            output.double(), expected, atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype]
        )


@pytest.mark.parametrize(
    "kernel", [*KERNELS, None], ids=[*(kernel.isa for kernel in KERNELS), "sdpa"]
)
@pytest.mark.parametrize("window", [None, 1, 9, 70, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_sees_both_ways_matches_the_reference_and_knows_no_neighbor(
    kernel: Kernel | None, window: int | None, dtype: torch.dtype
) -> None:
    lengths = (1, 130, 64, 17)
    options = {"sliding_window": window}
    case = Case(lengths=lengths, head_dim=32, dtype=dtype, options=options, both_ways=True)
    whole = [max(lengths)]
    outputs = attend(kernel, case, whole, min_rows=2)
    for output, expected in zip(outputs, reference(case), strict=True):
        torch.testing.assert_close(
            output.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )
    if kernel is not None:
        (alone,) = attend(kernel, replace(case, lengths=lengths[:1]), whole)
        assert torch.equal(alone, outputs[0])
        padded = attend(kernel, case, whole, min_rows=sum(lengths) + 5)
        assert all(torch.equal(one, other) for one, other in zip(padded, outputs, strict=True))


@pytest.mark.parametrize(
    "kernel", [*KERNELS, None], ids=[*(kernel.isa for kernel in KERNELS), "sdpa"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reach", [129, 200])
def test_a_bias_by_distance_matches_the_reference(
    kernel: Kernel | None, dtype: torch.dtype, reach: int
) -> None:
    biases = torch.randn(4, 2 * reach + 1, generator=torch.Generator().manual_seed(1))
    lengths = (1, 130, 64, 17)
    options = {"distance_bias": DistanceBias.of(biases)}
    case = Case(lengths=lengths, head_dim=32, dtype=dtype, options=options, both_ways=True)
    outputs = attend(kernel, case, [max(lengths)])
    for output, expected in zip(outputs, reference(case), strict=True):
        torch.testing.assert_close(
            output.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


def test_a_row_beyond_the_biases_is_refused() -> None:
    biases = torch.zeros(4, 2 * 128 + 1)
    case = Case(lengths=(130,), options={"distance_bias": DistanceBias.of(biases)}, both_ways=True)
    with pytest.raises(ProtocolError, match="position 128"):
        attend(KERNELS[-1], case, [130])


MODELS = {
    "softcap and alternate windows": (
        transformers.Gemma2Config,
        {"sliding_window": 8, "head_dim": 20},
    ),
    "a window in every layer": (transformers.MistralConfig, {"sliding_window": 8}),
    "a window that only the module knows": (
        transformers.Qwen2MoeConfig,
        {
            "sliding_window": 8,
            "use_sliding_window": True,
            "max_window_layers": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    "sinks": (
        transformers.GptOssConfig,
        {"sliding_window": 8, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}


@pytest.mark.parametrize(
    "kernel", [*KERNELS[:1], None], ids=lambda kernel: "sdpa" if kernel is None else kernel.isa
)
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_a_model_of_transformers_gets_what_it_asks_for(name: str, kernel: Kernel | None) -> None:
    # Given a small model with that kind of attention, and the logits that its own eager code gives
    config_class, extra = MODELS[name]
    torch.manual_seed(0)
    config = config_class(**_TINY, **extra)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    ids = torch.randint(0, 50, (1, 30))
    expected = model(ids, use_cache=False).logits

    # When the same model runs packed on our attention, in two chunks
    attention = Attention(kernel)
    model.set_attn_implementation(attention.name)
    shape = KvShape(num_kv_heads=2, head_dim=getattr(config, "head_dim", None) or 16)
    attention.bind(
        PagedKv(layers=dict.fromkeys(range(2), shape), num_blocks=3, dtype=torch.float32)
    )
    logits = []
    for start, end in ((0, 21), (21, 30)):
        attention.use(MicroBatch.of([Span(start=start, length=end - start, blocks=[2])]))
        positions = torch.arange(start, end)[None]
        logits.append(model(ids[:, start:end], position_ids=positions, use_cache=False).logits)

    # Then the logits agree
    torch.testing.assert_close(torch.cat(logits, 1), expected, atol=1e-4, rtol=1e-4)


_TINY: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def test_a_kv_block_costs_what_its_tensors_take() -> None:
    layers = {
        0: KvShape(num_kv_heads=2, head_dim=20),
        5: KvShape(num_kv_heads=1, head_dim=64, value_head_dim=24),
    }
    kv = PagedKv(layers=layers, num_blocks=3, dtype=torch.bfloat16)
    allocated = sum(t.nbytes for tensors in (kv.keys, kv.values) for t in tensors.values())
    assert PagedKv.bytes_per_block(layers, torch.bfloat16) * 3 == allocated
    assert all(values.shape[-1] % VECTOR_WIDTH == 0 for values in kv.values.values())
