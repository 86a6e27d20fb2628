"""Loads what runs packed rows: a shard with its attention and its KV. Every rank of a stage does
this, side by side.

Knows no StepPlan and no sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import structlog
import torch
from torch import nn

from services.stage.adapters.lora import ShardAdapters
from services.stage.attention import triton_backend
from services.stage.attention.attention import Attention
from services.stage.attention.offload_area import OffloadArea
from services.stage.attention.paged_kv import KvShape, PagedKv
from services.stage.device.device import INT4, INT8
from services.stage.device.owned_weights import give_back, own
from services.stage.device.uploads import Uploads
from services.stage.engine.accelerator_options import AcceleratorOptions
from services.stage.engine.encoder_rows import encoder_is_exact
from services.stage.engine.exactness import Probe, are_shared_whole, choose_row_buckets
from services.stage.engine.forward import Forward
from services.stage.engine.memory import Limits, WeightBytes
from services.stage.engine.shard_runner import Runner, ShardRunner
from services.stage.engine.step_graphs import CudaRecorder
from services.stage.kernels.kernel import Kernel, Weights
from services.stage.model.cpu_parts import CpuPart, num_bytes, parts_of
from services.stage.model.encoders.encoder_class import is_encoder, sees_both_ways
from services.stage.model.float_files import with_floats
from services.stage.model.gguf.stored_weights import stored_weights
from services.stage.model.kv_shapes import probe_kv_shapes
from services.stage.model.model_info import ModelInfo
from services.stage.model.mxfp4_experts import mxfp4_experts
from services.stage.model.packed_weights import packed_weights
from services.stage.model.shard import Shard, build_skeleton, shard_layers
from services.stage.model.split_layers import gathered, send_embedding, split_shard, widest
from services.stage.model.weights import weight_files
from services.stage.products.fused import NativeParts, fuse, fuse_norms
from services.stage.products.fused_gelu import fuse_gelus
from services.stage.products.fused_layer_norm import fuse_layer_norms
from services.stage.products.packing import (
    Packing,
    pack,
    packed_bytes,
    packing_for,
    unshare_embedding,
)
from services.stage.products.row_buckets import MAX_ADDED, VECTORS
from services.stage.products.stored import StoredWeight, fill, keep_all
from services.stage.products.triton_products import TritonParts
from services.stage.ranks.group import RankGroup
from services.stage.recurrent.states import RecurrentStates, StateShapes
from services.stage.streaming.streamed_layers import StreamedLayers, streamed_bytes
from shardline.base.errors import Invalid
from shardline_gguf import is_gguf

log = structlog.get_logger(__name__)

INTEGERS = {INT8: Weights.INT8, INT4: Weights.INT4}
"""By SHARDLINE_DTYPE: the format of weights that are integers."""


class Memory(Protocol):
    """What divides the memory of a stage, as one rank sees it. Its methods are called in this
    order."""

    def fit_weights(self, weights: WeightBytes) -> tuple[int, ...]:
        """Returns the layers to stream, by their numbers, so that the rest fits. Called before any
        weight is read. Raises Invalid, with the remedy, if it does not fit."""

    def make_states(self, shapes: Mapping[int, StateShapes]) -> RecurrentStates:
        """Allocates slots for what recurrent layers keep, of the memory of KV. Raises Invalid if
        it holds no slot."""

    def make_kv(
        self, kv_shapes: Mapping[int, KvShape], dtype: torch.dtype, *, context: int
    ) -> PagedKv:
        """Allocates the KV. Raises Invalid if the memory holds no KV block."""

    def make_offload_area(self, kv: PagedKv) -> OffloadArea:
        """Allocates slots next to the KV. Raises Invalid if there is no room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardLoad:
    """Which layers, how, and where. The same on all ranks, but for `memory` and the place in
    `group`."""

    info: ModelInfo
    layers: range
    device: torch.device
    of_dtype: torch.dtype
    """Of activations and KV."""
    weights_dtype: str
    limits: Limits
    memory: Memory
    cache_folder: Path
    options: AcceleratorOptions
    native: Kernel | None
    """On cores."""
    uploads: Uploads | None = None
    """Of an accelerator."""
    group: RankGroup | None = None
    """None: the stage is one process."""

    @property
    def packing(self) -> Packing:
        """How linear layers are packed, before ranks divide them."""
        if self.device.type != "cpu":
            return self.options.packing()
        return packing_for(self.of_dtype, self.native, INTEGERS.get(self.weights_dtype))

    @property
    def cpu_parts(self) -> frozenset[CpuPart]:
        """Returns the parts of the shard that stay on the CPU next to an accelerator."""
        return parts_of(self.options.cpu_parts, is_first=self.layers.start == 0)

    @property
    def adapter_packing(self) -> Packing:
        """Returns how adapters are packed: next to weights of integers they have the dtype of
        activations."""
        has_floats = self.packing.integers is None
        return self.packing if has_floats else packing_for(self.of_dtype, self.native)


@dataclass(frozen=True, slots=True)
class LoadedForward:
    """What runs packed rows, and what is known of their bits."""

    runner: Runner
    exact: bool
    num_ranks: int
    """On which a row's bits depend: 1 if they are those of one process."""


def load_forward(load: ForwardLoad) -> LoadedForward:
    """Loads a shard, packs its weights and allocates its KV. Raises Invalid for what cannot be
    served."""
    if load.group is not None:
        assert load.native is not None, "ranks need the CPU kernels"
        load.group.open(load.native, 0)
    looks_ahead = sees_both_ways(load.info.config)
    on_gpu = None if looks_ahead else triton_backend.load(load.device)
    attention = Attention(load.native or on_gpu, both_ways=looks_ahead)
    packing = load.packing
    converts = load.limits.streamed_layers != 0
    stored = _stored(load, attention)
    info = with_floats(
        load.info, load.layers, load.of_dtype, load.cache_folder, converts=converts, stored=stored
    )
    streamed_layers = _choose_streamed(load, info, attention, stored)
    shard = Shard.load(
        info,
        load.layers,
        dtype=load.of_dtype,
        attn_implementation=attention.name,
        device=load.device,
        cpu_parts=load.cpu_parts,
        streamed_layers=streamed_layers,
    )
    keep_all(shard.model, stored)
    if load.group is not None:
        split_shard(shard, load.group)
        packing = _for_ranks(packing, shard, load)
    streaming = (
        StreamedLayers.on(load.uploads, load.limits.streamed_folder)
        if shard.streamed_layers
        else None
    )
    pack_shard(shard, packing, streaming, group=load.group)
    kv_shapes = probe_kv_shapes(shard)
    shard.recurrence.kernel = load.native
    if load.native is not None:
        fuse_on_cores(shard.model, load.native)
    padding, rows_are_exact = choose_row_buckets(
        shard,
        can_be_exact=attention.exact and not shard.recurrence.is_torchs,
        cache_folder=load.cache_folder,
    )
    if shard.recurrence.shapes and load.limits.offload_bytes:
        raise Invalid(
            "SHARDLINE_KV_OFFLOAD_MIB",
            f"{load.info.config.model_type!r} keeps recurrent states, which are not offloaded",
            "Set it to 0",
        )
    states = load.memory.make_states(shard.recurrence.shapes)
    kv = load.memory.make_kv(kv_shapes, shard.dtype, context=load.info.context_length)
    forward = Forward(shard, attention, kv, padding, states)
    _save_calls(forward, load)
    rows_are_exact = rows_are_exact and are_shared_whole(forward.padding, load.limits.token_budget)
    exact = _is_exact(forward, rows_are_exact)
    area = load.memory.make_offload_area(kv)
    runner = ShardRunner(forward, area, ShardAdapters(shard, load.adapter_packing))
    return LoadedForward(runner, exact, _num_ranks_that_count(forward, load))


def fuse_on_cores(model: nn.Module, kernel: Kernel) -> None:
    """Replaces the elementwise parts of a packed model that the CPU kernels compute."""
    fuse_gelus(model, kernel)
    fuse(model, NativeParts(kernel))
    fuse_layer_norms(model, kernel)


def _stored(load: ForwardLoad, attention: Attention) -> Mapping[str, StoredWeight]:
    """Maps names to the weights that are read from the model's own files."""
    skeleton = partial(_skeleton, load, load.info, attention)
    if load.packing.integers is Weights.INT8:
        return mxfp4_experts(load.info, skeleton)
    if load.packing.integers is not Weights.INT4:
        return {}
    files = weight_files(load.info.path)
    if is_gguf(files[0]):
        return stored_weights(files, load.info.config)
    return packed_weights(load.info, skeleton)


def _skeleton(load: ForwardLoad, info: ModelInfo, attention: Attention) -> Any:
    name = attention.name
    return build_skeleton(info, load.layers, dtype=load.of_dtype, attn_implementation=name)


def _choose_streamed(
    load: ForwardLoad, info: ModelInfo, attention: Attention, stored: Mapping[str, StoredWeight]
) -> tuple[int, ...]:
    """Returns the layers that memory does not hold, by their numbers, after promising the rest.
    Raises Invalid for a model that does not fit, or that the options do not suit."""
    layers = load.layers
    skeleton = _skeleton(load, info, attention)
    keep_all(skeleton, stored)
    load.options.check(skeleton)
    by_layer = {
        number: streamed_bytes(layer, load.packing, load.device)
        for number, layer in shard_layers(skeleton, layers).items()
    }
    packed = packed_bytes(skeleton, load.packing, in_ranks=load.group is not None)
    held = packed - num_bytes(skeleton, load.cpu_parts)
    if layers.stop == info.num_layers and info.encoder is not None:
        held += info.encoder.num_bytes
    streamed_layers = load.memory.fit_weights(WeightBytes(held, by_layer))
    load.options.check_streamed(streamed_layers)
    return streamed_layers


def _for_ranks(packing: Packing, shard: Shard, load: ForwardLoad) -> Packing:
    """How a rank packs its share; makes room for what the ranks put together in one step."""
    assert load.group is not None
    assert load.native is not None
    assert packing.make is not None
    rows = load.limits.token_budget + MAX_ADDED
    load.group.open(load.native, rows * widest(shard) * shard.dtype.itemsize)
    return replace(packing, make_expert=gathered(packing.make, load.group))


def _num_ranks_that_count(forward: Forward, load: ForwardLoad) -> int:
    """torch computes the last elements of a row otherwise if they do not fill a vector. So a rank's
    shares must, unless our kernel computes whole layers."""
    if load.group is None or forward.num_fused == len(forward.shard.layer_modules):
        return 1
    return (
        1 if all(width % VECTORS == 0 for width in forward.shard.widths) else load.group.num_ranks
    )


def _is_exact(forward: Forward, rows_are_exact: bool) -> bool:
    if is_encoder(forward.shard.info.config):
        exact = rows_are_exact and encoder_is_exact(forward)
    else:
        probe = Probe(
            forward.sampled_outputs,
            forward.random_inputs,
            forward.kv.num_blocks,
            num_slots=forward.states.num_slots if forward.states and forward.is_recurrent else None,
        )
        exact = rows_are_exact and probe.passes()
    if not exact:
        kind = forward.attention.kind
        log.warning(
            "rows are not exact on this device: outputs may differ after a resume", kernel=kind
        )
    return exact


def _save_calls(forward: Forward, load: ForwardLoad) -> None:
    """Makes fewer calls of the same work: whole layers on the CPU, whole steps on a GPU."""
    if load.native is not None:
        forward.fuse_layers(load.native, load.group)
    shard = forward.shard
    # An encoder's rows end with their step.
    if is_encoder(shard.info.config):
        return
    if forward.is_recurrent:
        # A graph would replay one division of rows into sequences.
        if load.options.cuda_graphs:
            problem = "recurrent layers cannot be recorded"
            raise Invalid("SHARDLINE_CUDA_GRAPHS", problem, "Set it to false")
        return
    if load.options.records_graphs(load.device, shard.model, shard.streamed_layers):
        limits = load.limits
        forward.record_steps(
            CudaRecorder(), max_rows=limits.token_budget, max_sampled=2 * limits.max_decodes
        )


def pack_shard(
    shard: Shard,
    packing: Packing,
    streaming: StreamedLayers | None = None,
    *,
    group: RankGroup | None = None,
) -> None:
    """Packs a shard, and on the CPU copies its weights out of the loader's files. Those of its
    streamed layers go to the store of `streaming`. `group` has the ranks that divide it.

    This is done layer by layer: memory never holds more than one layer twice. Raises Invalid if the
    store has no room.
    """
    if shard.device.type == "cpu":
        _pack_on_cores(shard, packing, streaming, group)
    else:
        _pack_on_accelerator(shard, packing, streaming)
    if streaming is not None:
        streaming.start()


def _pack_on_cores(
    shard: Shard, packing: Packing, streaming: StreamedLayers | None, group: RankGroup | None
) -> None:
    unshares = shard.is_last or packing.integers is not None
    if shard.is_first and unshares and (group is None or group.rank == 0):
        # A tied output layer is packed in every split, so that one stage and three give the same
        # bits.
        unshare_embedding(shard.model, packing)
    for number, layer in shard.layer_modules.items():
        streamed = streaming if number in shard.streamed_layers else None
        _pack_piece(layer, packing, streamed, uses_embedding=shard.is_first)
    if shard.is_last:
        of_output = replace(packing, make=packing.make_output or packing.make)
        _pack_piece(shard.model, of_output, uses_embedding=shard.is_first)
    if group is not None and shard.is_first:
        send_embedding(shard.model, group)
    fill(shard.model)
    own(shard.model)


def _pack_on_accelerator(shard: Shard, packing: Packing, streaming: StreamedLayers | None) -> None:
    """Streamed layers are still in the host's memory: what is not streamed of them follows the
    others."""
    for number in shard.streamed_layers:
        layer = shard.layer_modules[number]
        _pack_piece(layer, packing, streaming)
        layer.to(shard.device)
    if packing.keeps_weights:
        _use_triton(shard, packing)


def _pack_piece(
    piece: nn.Module,
    packing: Packing,
    streaming: StreamedLayers | None = None,
    *,
    uses_embedding: bool = True,
) -> None:
    originals = [parameter.data for parameter in piece.parameters()]
    pack(piece, packing, uses_embedding=uses_embedding)
    if streaming is not None:
        streaming.take(piece)
    for original in originals:
        give_back(original)


def _use_triton(shard: Shard, packing: Packing) -> None:
    """An output layer that stays on the CPU stays torch's."""
    layers = list(shard.layer_modules.values())
    has_output = shard.is_last and shard.output_device == shard.device
    for piece in [*layers, shard.model] if has_output else layers:
        pack(piece, packing)
    parts = TritonParts(shard.device)
    if shard.streamed_layers:  # a trial of their products would run without weights
        fuse_norms(shard.model, parts.norm)
    else:
        fuse(shard.model, parts)
