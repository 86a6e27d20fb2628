"""The whole path of a stage on a GPU that is not there, in every architecture: no operator mixes
devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from services.stage.attention.paged_kv import Span
from services.stage.engine import loading
from services.stage.engine.accelerator_options import AcceleratorOptions
from services.stage.engine.executor import Executor
from services.stage.engine.memory import Limits
from services.stage.engine.step_graphs import graph_sizes
from services.stage.model.cpu_parts import parse_parts
from services.stage.model.model_info import ModelInfo
from services.stage.products.triton_products import TritonLinear
from shardline.base.errors import Invalid
from shardline.contract.fleet.split import even_split
from shardline.contract.job import SamplingParams
from shardline_scheduler.step_plan import Move, Open, Row, StepPlan, StepResult
from tests.models import CONFIGS, RECURRENT, save_model
from tests.unit.stage.engine.fake_gpu import FakeGpu, FakeRecorder, fake_gpu

MIB = 1 << 20
PROMPT = tuple(range(3, 80))
"""Two KV blocks."""
SHORT_PROMPT = PROMPT[:6]
"""Of recurrent layers, which torch computes token by token where there is no kernel."""
MIXTURES = ("mixtral", "qwen3-moe", "gpt-oss", "olmoe", "granitemoe", "llama4")
WITH_LAYER_NORM = (
    *("phi", "gpt-neox", "cohere", "cohere2", "starcoder2"),
    *("gpt2", "gpt-bigcode", "opt", "stablelm", "nemotron"),
)
BY_ATTENTION = ("llama", "gemma2", "gpt-oss", "llama4", "gpt-bigcode", "opt", "qwen3-next")
"""One of each kind that torch computes without our kernels: plain, with windows and soft caps, with
sinks, in chunks, with one key head, with learned positions, beside recurrent layers."""
IN_THREE_STAGES = ("llama", "gemma2", "mixtral")
"""With a stage that neither embeds nor samples; for all others head and tail tell enough."""
TORCH = AcceleratorOptions(products="torch", cuda_graphs=False)
TRITON = AcceleratorOptions(products="triton", cuda_graphs=False)
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, logprobs=2),
    SamplingParams(
        temperature=0.0,
        min_tokens=4,
        stop_token_ids=(5,),
        repetition_penalty=1.1,
        presence_penalty=0.5,
    ),
)


@pytest.fixture(params=["triton", "sdpa"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a GPU attends: without our kernels through torch."""
    kind = str(request.param)
    monkeypatch.setenv("SHARDLINE_KERNEL", "off" if kind == "sdpa" else "auto")
    return kind


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_dense_model_runs_in_every_dtype_of_a_gpu(
    dtype: str, attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stage,) = run_chain(save_model(tmp_path), 1, dtype, tmp_path, monkeypatch)
    assert stage.attention_kind == attention
    assert stage.forward._last is not None, (
        "an operator raised in the trial of a narrowed last layer"
    )


@pytest.mark.parametrize("name", BY_ATTENTION)
def test_without_kernels_a_model_runs_on_a_gpu_without_mixing_devices(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDLINE_KERNEL", "off")
    run_chain(save_model(tmp_path, name), 1, "float32", tmp_path, monkeypatch)


@pytest.mark.parametrize("name", CONFIGS)
def test_with_our_products_rows_are_exact_unless_torch_computes_some(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_stages = 3 if name in IN_THREE_STAGES else 2
    stages = run_chain(
        save_model(tmp_path, name), num_stages, "bfloat16", tmp_path, monkeypatch, options=TRITON
    )

    is_covered = name not in {*WITH_LAYER_NORM, *MIXTURES, *RECURRENT}
    assert [stage.exact for stage in stages] == [is_covered] * num_stages


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "phi", "gpt2", "gpt-bigcode", "opt", "mixtral", "gpt-oss"]
)
def test_streamed_layers_compute_on_the_gpu_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_model(tmp_path, name)
    (stage,) = run_chain(
        path, 1, "float32", tmp_path, monkeypatch, options=TRITON, streamed_layers=3
    )

    assert len(stage.forward.shard.streamed_layers) == 3
    assert stage.exact is (name not in {*WITH_LAYER_NORM, *MIXTURES})


def test_graphs_of_streamed_layers_are_refused_with_both_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = AcceleratorOptions(cuda_graphs=True)
    with pytest.raises(
        Invalid, match=r"SHARDLINE_CUDA_GRAPHS: 2 layers are.*SHARDLINE_STREAMED_LAYERS to 0"
    ):
        run_chain(
            save_model(tmp_path),
            1,
            "float32",
            tmp_path,
            monkeypatch,
            options=graphs,
            streamed_layers=2,
        )


def test_torchs_products_are_not_exact_and_have_another_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_model(tmp_path)
    (torchs,) = run_chain(path, 1, "bfloat16", tmp_path, monkeypatch)
    (ours,) = run_chain(path, 1, "bfloat16", tmp_path, monkeypatch, options=TRITON)

    assert (torchs.exact, ours.exact) == (False, True)
    assert torchs.fingerprint != ours.fingerprint


@pytest.mark.parametrize("parts", ["embedding", "output", "embedding,output"])
def test_with_our_products_an_output_layer_on_the_cpu_stays_torchs(
    parts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = AcceleratorOptions(cpu_parts=parse_parts(parts))
    (stage,) = run_chain(
        save_model(tmp_path), 1, "bfloat16", tmp_path, monkeypatch, options=options
    )

    assert stage.exact is ("output" not in parts)
    assert isinstance(stage.forward.shard.model.lm_head, TritonLinear) is stage.exact


def test_a_step_of_a_dense_layer_is_eleven_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_model(tmp_path)
    gpu = FakeGpu(tmp_path)
    limits = Limits(kv_bytes=MIB, token_budget=256, max_open=8)
    with fake_gpu(monkeypatch) as kernels:
        stage = Executor.load(
            model=path,
            layers=range(1, 2),
            device=gpu,
            dtype="bfloat16",
            limits=limits,
            cache_folder=tmp_path,
            on_accelerator=TRITON,
        )
        before = {name: kernel.num_launches for name, kernel in kernels.items()}
        plan = plans(PROMPT, moves=False)[0]
        num_rows = sum(row.length for row in plan.rows)
        stage.run(plan, torch.ones(num_rows, stage.info.hidden_size, dtype=torch.bfloat16))

    launches = {name: kernel.num_launches - before[name] for name, kernel in kernels.items()}
    assert launches == {
        "write": 1,
        "attend": 1,
        "multiply": 4,
        "rms_norm": 2,
        "silu_mul": 1,
        "rotate": 2,
        "draw": 0,
    }
    gpu.release()


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in {*MIXTURES, *RECURRENT}])
def test_a_step_holds_nothing_that_a_cuda_graph_cannot(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(tmp_path)
    info = ModelInfo.read(save_model(tmp_path, name))
    limits = Limits(kv_bytes=MIB, token_budget=8, max_open=2)
    with fake_gpu(monkeypatch), torch.inference_mode():
        for layers in even_split(info.num_layers, 2):
            stage = Executor.load(
                model=info,
                layers=layers,
                device=gpu,
                dtype="bfloat16",
                limits=limits,
                cache_folder=tmp_path,
                on_accelerator=TORCH,
            )
            stage.forward.record_steps(
                FakeRecorder(), max_rows=limits.token_budget, max_sampled=limits.max_decodes
            )
            spans = [Span(start=70, length=1, blocks=[0, 1]), Span(start=3, length=5, blocks=[2])]
            x = stage.forward.random_inputs(6, torch.Generator())
            out = stage.forward.sampled_outputs(spans, x, [0, 5])
            assert len(out) == 2
            assert out.device.type == "cuda"
    gpu.release()


def test_by_default_a_gpu_is_exact_and_replays_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = FakeRecorder()
    monkeypatch.setattr(loading, "CudaRecorder", lambda: recorder)
    options = AcceleratorOptions()
    (stage,) = run_chain(
        save_model(tmp_path), 1, "bfloat16", tmp_path, monkeypatch, options=options
    )

    assert stage.exact
    assert recorder.num_recorded == len(graph_sizes(stage.token_budget))


@pytest.mark.parametrize(
    ("kernel", "options", "reason"),
    [
        ("off", AcceleratorOptions(cuda_graphs=True), "SHARDLINE_KERNEL=off"),
        (
            "auto",
            AcceleratorOptions(cuda_graphs=True, cpu_parts=parse_parts("output")),
            "SHARDLINE_CPU_PARTS",
        ),
    ],
)
def test_graphs_are_refused_where_a_step_cannot_be_recorded(
    kernel: str,
    options: AcceleratorOptions,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHARDLINE_KERNEL", kernel)
    gpu = FakeGpu(tmp_path)
    with pytest.raises(Invalid, match=f"SHARDLINE_CUDA_GRAPHS.*{reason}"):
        options.on(gpu)
    gpu.release()


def test_graphs_of_a_mixture_which_asks_for_values_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_model(tmp_path, "mixtral")
    (stage,) = run_chain(path, 1, "bfloat16", tmp_path, monkeypatch)
    with (
        fake_gpu(monkeypatch),
        torch.inference_mode(),
        pytest.raises(AssertionError, match="a graph cannot hold"),
    ):
        stage.forward.record_steps(FakeRecorder(), max_rows=1, max_sampled=1)
    with pytest.raises(Invalid, match=r"SHARDLINE_CUDA_GRAPHS.*experts"):
        run_chain(
            path, 1, "bfloat16", tmp_path, monkeypatch, options=AcceleratorOptions(cuda_graphs=True)
        )


def test_products_in_triton_are_refused_where_it_does_not_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDLINE_KERNEL", "off")
    with pytest.raises(Invalid, match=r"SHARDLINE_GPU_PRODUCTS.*SHARDLINE_KERNEL=off"):
        run_chain(save_model(tmp_path), 1, "bfloat16", tmp_path, monkeypatch, options=TRITON)


def test_a_mix_of_devices_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu(monkeypatch), pytest.raises(RuntimeError, match=r"cuda:0(,| and) cpu"):
        torch.ones(2, device="cuda") + torch.ones(2)


def run_chain(
    path: Path,
    num_stages: int,
    dtype: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    options: AcceleratorOptions = TORCH,
    streamed_layers: int = 0,
) -> list[Executor]:
    """Loads head, middle and tail, and runs a prefill in two chunks, moves of KV, a decode, and a
    close.

    Activations go from stage to stage through the host, as the hop carries them.
    """
    gpu = FakeGpu(folder)
    limits = Limits(
        kv_bytes=MIB,
        offload_bytes=0 if path.name in RECURRENT else MIB // 2,
        token_budget=256,
        max_open=8,
        streamed_layers=streamed_layers,
    )
    info = ModelInfo.read(path)
    with fake_gpu(monkeypatch):
        stages = [
            Executor.load(
                model=info,
                layers=layers,
                device=gpu,
                dtype=dtype,
                limits=limits,
                cache_folder=folder,
                on_accelerator=options,
            )
            for layers in even_split(info.num_layers, num_stages)
        ]
        prompt = SHORT_PROMPT if path.name in RECURRENT else PROMPT
        for plan in plans(prompt, moves=bool(limits.offload_bytes)):
            hidden = None
            for stage in stages:
                out = stage.run(plan, hidden)
                if isinstance(out, StepResult):
                    plan.check(out)
                    break
                assert out.device.type == "cpu" or isinstance(out, FakeTensor)
                hidden = out.cpu()
    assert isinstance(out, StepResult)
    gpu.release()
    return stages


def plans(prompt: tuple[int, ...], *, moves: bool) -> list[StepPlan]:
    """Three sequences that sample in different ways. The fake answers are all 1: so are the tokens
    that are sampled."""
    half = len(prompt) // 2
    later = len(prompt) - half
    blocks = [(2 * place, 2 * place + 1) for place in range(len(KINDS))]
    alike: dict[str, Any] = {"ids": prompt, "num_prompt": len(prompt), "num_blocks": 2}
    opens = tuple(
        Open(seq=place, params=params, seed=place, state=place, **alike)
        for place, params in enumerate(KINDS)
    )
    first = tuple(Row(seq, 0, half, (), blocks[seq], wants=False) for seq in range(len(KINDS)))
    rest = tuple(Row(seq, half, later, (), (), wants=True) for seq in range(len(KINDS)))
    there_and_back = (Move(0, 0, is_out=True), Move(0, 0, is_out=False))
    return [
        StepPlan(0, opens, first, ()),
        StepPlan(1, (), rest, (), moves=there_and_back if moves else ()),
        StepPlan(
            2,
            (),
            tuple(Row(seq, len(prompt), 1, (1,), (), wants=True) for seq in range(len(KINDS))),
            (),
        ),
        StepPlan(3, (), (), tuple(range(len(KINDS)))),
    ]
