"""The torch side of a stage: runs StepPlans over its shard and its KV, and samples at the tail.

Allocates no KV block and decides nothing: the head's scheduler does. Knows no hop and no job.

Letters of shapes: T packed rows of the step, H the hidden size.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import structlog
import torch
from torch import Tensor, nn

from services.stage.attention import triton_backend
from services.stage.attention.attention import Attention, Span
from services.stage.attention.offload_area import OffloadArea
from services.stage.device.device import INT8, Device
from services.stage.device.staging import Staging
from services.stage.engine.accelerator_options import AcceleratorOptions
from services.stage.engine.adapter_pool import AdapterPool
from services.stage.engine.decode_graphs import CudaRecorder
from services.stage.engine.exactness import Probe, choose_row_buckets, exactness_fingerprint
from services.stage.engine.forward import Forward
from services.stage.engine.memory import Limits, StageMemory, WeightBytes
from services.stage.engine.sampler import SampledSequence, Sampler
from services.stage.engine.split_trial import check_split
from services.stage.kernels import kernel
from services.stage.kernels.kernel import Kernel
from services.stage.model.cpu_parts import num_bytes, parts_of
from services.stage.model.float_files import with_floats
from services.stage.model.fused import fuse, fuse_norms
from services.stage.model.kv_shapes import probe_kv_shapes
from services.stage.model.lora import ShardAdapters
from services.stage.model.model_info import ModelInfo
from services.stage.model.owned_weights import give_back, own
from services.stage.model.packing import Packing, pack, packed_bytes, packing_for, tiled_bytes, unshare_embedding
from services.stage.model.peft import AdapterFolder
from services.stage.model.shard import Shard, shard_layers
from services.stage.model.streamed_layers import StreamedLayers
from services.stage.model.triton_products import TritonRmsNorm
from services.stage.model.weights import fingerprint
from services.stage.scheduling.open_sequences import OpenSequences
from services.stage.scheduling.step_plan import StepPlan, StepResult
from shardline.clock import monotonic_s
from shardline.errors import ProtocolError

log = structlog.get_logger(__name__)


class Executor:
    """One stage's shard with its KV. `run` and `reset` are called by one thread only."""

    def __init__(
        self,
        forward: Forward,
        area: OffloadArea,
        limits: Limits,
        device: Device,
        adapters: AdapterPool,
        *,
        exact: bool,
        fingerprint: str,
    ) -> None:
        shard = forward.shard
        self.info, self.layers, self.dtype = shard.info, shard.layers, shard.dtype
        self.is_first, self.is_last = shard.is_first, shard.is_last
        self.num_blocks, self.token_budget = forward.kv.num_blocks, limits.token_budget
        self.max_adapters = limits.max_adapters
        self.exact, self.fingerprint, self.attention_kind = exact, fingerprint, forward.attention.kind
        self.offload, self.adapters = area.terms, adapters.folder
        self.forward, self._area, self._device, self._adapters = forward, area, device, adapters
        self._open_sequences = OpenSequences(
            num_blocks=self.num_blocks, max_open=limits.max_open, vocab_size=self.info.vocab_size
        )
        self._sampler = Sampler(vocab_size=self.info.vocab_size, eos_ids=self.info.eos_ids, device=shard.output_device)
        self._sampled: dict[int, SampledSequence] = {}

    @classmethod
    def load(
        cls,
        *,
        model: str | Path | ModelInfo,
        layers: range,
        device: Device,
        dtype: str,
        limits: Limits,
        cache_folder: Path,
        on_accelerator: AcceleratorOptions = AcceleratorOptions(),  # noqa: B008 (frozen)
    ) -> Executor:
        """Loads a shard, packs its weights, allocates its KV and checks whether its rows are exact.

        Cores ignore `on_accelerator`. Raises Invalid for what cannot be served, Unavailable if the hub does not answer.
        """
        options, memory = on_accelerator.on(device), StageMemory(limits, device)
        info = model if isinstance(model, ModelInfo) else ModelInfo.read(model)
        check_split(info.config, cache_folder)
        native = kernel.load() if device.is_cpu else None
        attention = Attention(native or triton_backend.load(device.torch_device))
        of_dtype, parts = device.dtype(dtype), parts_of(options.cpu_parts, is_first=layers.start == 0)
        packing = packing_for(of_dtype, native, int8=dtype == INT8) if device.is_cpu else options.packing()
        converts = device.is_cpu and limits.streamed_layers != 0
        source = with_floats(info, layers, of_dtype, cache_folder, converts=converts)

        def check(model: nn.Module) -> None:
            options.check(model)
            tiles = {number: tiled_bytes(layer, packing) for number, layer in shard_layers(model, layers).items()}
            memory.check_fits(WeightBytes(packed_bytes(model, packing) - num_bytes(model, parts), tiles))

        with torch.inference_mode():
            shard = Shard.load(
                source,
                layers,
                dtype=of_dtype,
                attn_implementation=attention.name,
                device=device.torch_device,
                cpu_parts=parts,
                check=check,
            )
            kv_shapes = probe_kv_shapes(shard)
            pack_shard(shard, packing, streamed=memory.streamed_layers, folder=limits.streamed_folder)
            if native is not None:
                fuse(shard.model, native)
            padding, rows_are_exact = choose_row_buckets(
                shard, can_be_exact=attention.exact, token_budget=limits.token_budget, cache_folder=cache_folder
            )
            kv = memory.make_kv(kv_shapes, shard.dtype, context=info.context_length)
            forward = Forward(shard, attention, kv, padding)
            _save_calls(forward, native, options, limits)
            exact = _is_exact(forward, rows_are_exact)
            adapters = _adapter_pool(shard, packing, native, limits, cache_folder)
            area = memory.make_offload_area(kv)
        weights = fingerprint(info.path, cache_folder)
        name = _exactness(weights, shard.dtype, attention, packing, device)
        return cls(forward, area, limits, device, adapters, exact=exact, fingerprint=name)

    @property
    def blocks_used(self) -> int:
        """The number of KV blocks in the block tables of open sequences."""
        return self._open_sequences.blocks_used

    @property
    def num_open(self) -> int:
        """The number of open sequences."""
        return len(self._open_sequences)

    @property
    def num_adapters(self) -> int:
        """The number of adapters in memory."""
        return self._adapters.num_loaded

    def seeds(self, plan: StepPlan, *, decoding: bool) -> set[int]:
        """Returns the seeds of the sequences that this plan, not yet run, decodes, or whose prompts it computes."""
        return self._open_sequences.seeds(plan, decoding=decoding)

    def enter_thread(self) -> None:
        """Makes the stage's device that of the calling thread, which is to run steps."""
        self._device.enter_thread()

    def staging(self, num_buffers: int) -> Staging | None:
        """Returns buffers for the activations of so many steps in flight; None if copies block on this device."""
        return self._device.staging(num_buffers, self.token_budget * self.info.hidden_size * self.dtype.itemsize)

    def reset(self) -> None:
        """Forgets every open sequence, for a new epoch."""
        self._open_sequences.clear()
        self._adapters.clear()
        self._sampled.clear()

    def admit(self, plan: StepPlan) -> StepPlan:
        """Loads the adapters that sequences of this plan, not yet run, open with; returns the plan, which names among
        its refused sequences those that cannot have theirs."""
        return self._adapters.admit(plan)

    @torch.inference_mode()
    def run(self, plan: StepPlan, hidden: Tensor | None) -> Tensor | StepResult:
        """Runs one step: returns the hidden states [T, H] in `dtype` for the next stage, or the tail's answer.

        `hidden` are the activations [T, H] in `dtype` of the stage before, in host memory; the head ignores them. An
        accelerator may still compute the hidden states that it returns; an answer is computed. Raises ProtocolError for
        a plan or activations that do not fit what this stage knows: the epoch is over then.
        """
        began_s = monotonic_s()
        if plan.num_tokens > self.token_budget:
            raise ProtocolError(f"step {plan.step} has {plan.num_tokens} tokens, the budget is {self.token_budget}")
        self._area.move(plan.moves)
        for opened in plan.opens:
            self._open_sequences.open(opened)
            if self.is_last:
                self._sampled[opened.seq] = self._sampler.open(opened)
        spans, ids = self._extend(plan)
        x = self._input(ids, hidden)
        with self._adapters.applied(plan, self.forward):
            out = self._answer(plan, spans, x, began_s) if self.is_last else self._states(spans, x)
        for seq in plan.closes:
            self._open_sequences.close(seq)
            self._adapters.close(seq)
            self._sampled.pop(seq, None)
        return out

    def _extend(self, plan: StepPlan) -> tuple[list[Span], list[int]]:
        spans: list[Span] = []
        ids: list[int] = []
        for row, known in self._open_sequences.extend(plan):
            spans.append(Span(start=row.start, length=row.length, blocks=known.blocks))
            ids += known.ids[row.start : row.start + row.length]
        return spans, ids

    def _input(self, ids: list[int], hidden: Tensor | None) -> Tensor:
        if self.is_first:
            return self._to_device(torch.tensor(ids, dtype=torch.long))
        expected = (len(ids), self.info.hidden_size)
        if not ids:  # a step that only closes sequences travels without activations
            return torch.empty(expected, dtype=self.dtype)
        if hidden is None or hidden.shape != expected or hidden.dtype != self.dtype:
            shown = "none" if hidden is None else f"{tuple(hidden.shape)} of {hidden.dtype}"
            raise ProtocolError(f"activations {expected} of {self.dtype} are needed, not {shown}")
        return self._to_device(hidden)

    def _to_device(self, x: Tensor) -> Tensor:
        """Does not wait: what the host goes on with runs on the same stream, behind the copy."""
        return x.to(self._device.torch_device, non_blocking=True)

    def _states(self, spans: list[Span], x: Tensor) -> Tensor:
        if not spans:  # a step that only closes sequences
            return torch.empty(0, self.info.hidden_size, dtype=self.dtype)
        return self.forward.hidden(spans, x)

    def _answer(self, plan: StepPlan, spans: list[Span], x: Tensor, began_s: float) -> StepResult:
        rows, sequences = self._sampled_rows(plan)
        if rows:
            logits = self.forward.sampled_outputs(spans, x, rows)
            drafts = [row.drafts for row in plan.rows if row.wants] if plan.num_drafts else None
            tokens, logprobs, bad = self._sampler.sample(logits, sequences, drafts)
            return StepResult(plan.step, tokens, logprobs, bad, monotonic_s() - began_s, plan.refused)
        if spans:
            self.forward.write(spans, x)
            self._device.synchronize()  # an answer says that its step is computed, and how long it took
        return StepResult(plan.step, (), compute_s=monotonic_s() - began_s, refused=plan.refused)

    def _sampled_rows(self, plan: StepPlan) -> tuple[list[int], list[SampledSequence]]:
        """Returns the packed rows after which a token may be sampled, and the sequences that want one."""
        rows: list[int] = []
        sequences: list[SampledSequence] = []
        end = 0
        for row in plan.rows:
            end += row.length
            sequence = self._sampled[row.seq]
            if row.ids and row.start != sequence.num_known:
                raise ProtocolError(
                    f"sequence {row.seq} goes on behind {row.start} tokens, but {sequence.num_known} came true"
                )
            sequence.extend(row.ids)
            if row.wants:
                rows += range(end - 1 - len(row.drafts), end)
                sequences.append(sequence)
        return rows, sequences


def _exactness(weights: str, dtype: torch.dtype, attention: Attention, packing: Packing, device: Device) -> str:
    """The exactness fingerprint."""
    return exactness_fingerprint(
        weights=weights,
        dtype=dtype,
        kernel=attention.version,
        packing=packing.name,
        num_threads=device.num_threads,
        device=device.identity(),
    )


def _is_exact(forward: Forward, rows_are_exact: bool) -> bool:
    exact = rows_are_exact and Probe(forward.sampled_outputs, forward.random_inputs, forward.kv.num_blocks).passes()
    if not exact:
        kind = forward.attention.kind
        log.warning("rows are not exact on this device: outputs may differ after a resume", kernel=kind)
    return exact


def _adapter_pool(
    shard: Shard, packing: Packing, native: Kernel | None, limits: Limits, cache_folder: Path
) -> AdapterPool:
    """Adapters beside int8 weights have the dtype of activations."""
    own_packing = packing_for(shard.dtype, native) if packing.int8 else packing
    folder = AdapterFolder(limits.adapters_folder, shard.linear_sizes, cache_folder)
    return AdapterPool(ShardAdapters(shard, own_packing), folder, max_adapters=limits.max_adapters)


def _save_calls(forward: Forward, native: Kernel | None, options: AcceleratorOptions, limits: Limits) -> None:
    """Makes fewer calls of the same work: whole layers on the CPU, whole decode steps on a GPU."""
    if native is not None:
        forward.fuse_layers(native)
    if options.cuda_graphs:
        forward.record_decodes(CudaRecorder(), max_rows=limits.max_decodes)


def pack_shard(shard: Shard, packing: Packing, *, streamed: Collection[int] = (), folder: Path = Path()) -> None:
    """Packs a shard, and on the CPU copies its weights out of the loader's files: those of the layers with the numbers
    `streamed` into a file in `folder`.

    This is done layer by layer: memory never holds more than one layer twice. Raises Invalid if the disk has no room.
    """
    if shard.device.type != "cpu":
        if packing.keeps_weights:
            _use_triton(shard, packing)
        return
    if shard.is_first and (shard.is_last or packing.int8):
        # A tied output layer is packed in every split, so that one stage and three give the same bits.
        unshare_embedding(shard.model, packing)
    streaming = StreamedLayers(folder) if streamed else None
    for number, layer in shard.layer_modules.items():
        _pack_piece(layer, packing, uses_embedding=shard.is_first)
        if streaming is not None and number in streamed:
            streaming.take(layer)
    if shard.is_last:
        _pack_piece(shard.model, packing, uses_embedding=shard.is_first)
    own(shard.model)
    if streaming is not None:
        streaming.start()
        shard.streamed_layers = tuple(streamed)


def _pack_piece(piece: nn.Module, packing: Packing, *, uses_embedding: bool) -> None:
    originals = [parameter.data for parameter in piece.parameters()]
    pack(piece, packing, uses_embedding=uses_embedding)
    for original in originals:
        give_back(original)


def _use_triton(shard: Shard, packing: Packing) -> None:
    """An output layer that stays on the CPU stays torch's."""
    layers = list(shard.layer_modules.values())
    has_output = shard.is_last and shard.output_device == shard.device
    for piece in [*layers, shard.model] if has_output else layers:
        pack(piece, packing)
    fuse_norms(shard.model, TritonRmsNorm)
