"""The torch side of a stage: runs StepPlans over its shard and its KV, and samples at the tail.

Allocates no KV block and decides nothing: the head's scheduler does. Knows no hop and no job.

Letters of shapes: T packed rows of the step, H the hidden size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import structlog
import torch
from torch import Tensor

from services.stage.adapters.peft import AdapterFolder
from services.stage.attention.attention import Span
from services.stage.device.device import Device
from services.stage.device.staging import Staging
from services.stage.engine.accelerator_options import AcceleratorOptions
from services.stage.engine.adapter_pool import AdapterPool
from services.stage.engine.exactness import exactness_fingerprint
from services.stage.engine.loading import ForwardLoad, LoadedForward, load_forward
from services.stage.engine.memory import Limits, StageMemory
from services.stage.engine.pooling import Pooling
from services.stage.engine.ranked_runner import load_ranked
from services.stage.engine.shard_runner import AdapterRows, Pass, Runner
from services.stage.engine.split_trial import check_split
from services.stage.engine.tensors import check_frames
from services.stage.kernels import kernel
from services.stage.model.model_info import ModelInfo
from services.stage.model.weights import fingerprint
from services.stage.ranks.messages import PassKind
from services.stage.recurrent.slots import Slots
from services.stage.sampling.prompt_scores import (
    ScoredPrompt,
    ScoredRows,
    merged_rows,
    score,
    scored_prompt,
)
from services.stage.sampling.sampled_sequence import SampledSequence
from services.stage.sampling.sampler import Sampler
from shardline.base.clock import monotonic_s
from shardline.base.errors import ProtocolError
from shardline_scheduler.open_sequences import OpenSequences
from shardline_scheduler.scheduler import NOT_FINITE
from shardline_scheduler.step_plan import StepPlan, StepResult
from shardline_server.tokenize.grammars.grammar import Grammars
from shardline_server.tokenize.grammars.grammar_load import GrammarLoad

log = structlog.get_logger(__name__)


class Executor:
    """One stage's shard with its KV. `run` and `reset` are called by one thread only."""

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        device: Device,
        adapters: AdapterPool,
        *,
        exact: bool,
        fingerprint: str,
        grammars: Callable[[], Grammars] | None = None,
    ) -> None:
        forward = self.forward = runner.forward
        shard = forward.shard
        self.info = shard.info
        self.layers = shard.layers
        self.dtype = shard.dtype
        self.is_first = shard.is_first
        self.is_last = shard.is_last
        self.num_blocks = forward.kv.num_blocks
        self.token_budget = limits.token_budget
        self.max_adapters = limits.max_adapters
        self.exact = exact
        self.fingerprint = fingerprint
        self.attention_kind = forward.attention.kind
        self.offload = runner.area.terms
        self.adapters = adapters.folder
        self._runner = runner
        self._device = device
        self._adapters = adapters
        self._open_sequences = OpenSequences(
            num_blocks=self.num_blocks, max_open=limits.max_open, vocab_size=self.info.vocab_size
        )
        self._sampler = Sampler(
            vocab_size=self.info.vocab_size,
            eos_ids=self.info.eos_ids,
            device=shard.output_device,
            grammars=grammars,
        )
        self._pooling = Pooling(shard) if self.is_last and self.info.encoder else None
        states = forward.states
        self.num_states = states.num_slots if states is not None and forward.is_recurrent else 0
        """Slots of states that the recurrent layers hold; 0: there are no such layers."""
        self._slots = Slots(states if forward.is_recurrent else None)
        self._sampled: dict[int, SampledSequence] = {}
        self._scored: dict[int, ScoredPrompt] = {}

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

        Cores ignore `on_accelerator`. Raises Invalid for what cannot be served, Unavailable if the
        hub does not answer.
        """
        device.enter_thread()
        info = (
            model
            if isinstance(model, ModelInfo)
            else ModelInfo.read(model, cache_folder=cache_folder)
        )
        if len(layers) < info.num_layers:
            check_frames(limits.token_budget, info.hidden_size * device.dtype(dtype).itemsize)
        check_split(info.config, cache_folder)
        samples = layers.stop == info.num_layers and info.encoder is None
        grammars = _grammars(info) if samples else None
        memory = StageMemory(limits, device)
        load = ForwardLoad(
            info=info,
            layers=layers,
            device=device.torch_device,
            of_dtype=device.dtype(dtype),
            weights_dtype=dtype,
            limits=limits,
            memory=memory,
            cache_folder=cache_folder,
            options=on_accelerator.on(device),
            native=kernel.load() if device.is_cpu else None,
            uploads=device.uploads(),
        )
        with torch.inference_mode():
            ranks = device.ranks
            loaded = load_forward(load) if ranks is None else load_ranked(ranks, load, memory)
        runner = loaded.runner
        forward = loaded.runner.forward
        folder = AdapterFolder(limits.adapters_folder, forward.shard.linear_sizes, cache_folder)
        adapters = AdapterPool(runner, folder, max_adapters=limits.max_adapters)
        weights = fingerprint(info.path, cache_folder)
        name = exactness_fingerprint(
            weights=weights,
            dtype=forward.shard.dtype,
            kernel=forward.attention.version,
            packing=_packing(load, loaded),
            num_threads=device.num_threads,
            device=device.identity(),
        )
        make = partial(cls, runner, limits, device, adapters, grammars=grammars)
        return make(exact=loaded.exact, fingerprint=name)

    @property
    def blocks_used(self) -> int:
        """The number of KV blocks in the block tables of open sequences."""
        return self._open_sequences.blocks_used

    @property
    def num_open(self) -> int:
        """The number of open sequences."""
        return len(self._open_sequences)

    @property
    def states_used(self) -> int:
        """The number of slots of states that open sequences have."""
        return self._slots.num_used

    @property
    def num_adapters(self) -> int:
        """The number of adapters in memory."""
        return self._adapters.num_loaded

    def enter_thread(self) -> None:
        """Makes the stage's device that of the calling thread, which is to run steps and nothing
        else."""
        self._device.enter_thread()
        self._device.stand_back()

    def staging(self, num_buffers: int) -> Staging | None:
        """Returns buffers for the activations of `num_buffers` steps in flight; None if copies
        block on this device."""
        return self._device.staging(
            num_buffers, self.token_budget * self.info.hidden_size * self.dtype.itemsize
        )

    def drop(self) -> None:
        """Frees what other processes hold of the shard; nothing runs any more."""
        self._runner.drop()

    @torch.inference_mode()
    def run_pass(self, what: Pass, x: Tensor) -> Tensor:
        """Runs rows without sequences, to measure it: `x` are ids int64 [T], or states [T, H] in
        `dtype`; returns states [T, H] or logits [R, V]."""
        return self._runner.run(what, x)

    def reset(self) -> None:
        """Forgets every open sequence, for a new epoch."""
        self._open_sequences.clear()
        self._slots.clear()
        self._adapters.clear()
        self._sampled.clear()
        self._scored.clear()

    def admit(self, plan: StepPlan) -> StepPlan:
        """Loads the adapters that sequences of this plan, not yet run, open with; returns the plan,
        which names among its refused sequences those that cannot have theirs."""
        return self._adapters.admit(plan)

    @torch.inference_mode()
    def run(self, plan: StepPlan, hidden: Tensor | None) -> Tensor | StepResult:
        """Runs one step: returns the hidden states [T, H] in `dtype` for the next stage, or the
        tail's answer.

        `hidden` are the activations [T, H] in `dtype` of the stage before, in host memory; the head
        ignores them. An accelerator may still compute the hidden states that it returns; an answer
        is computed. Raises ProtocolError for a plan or activations that do not fit what this stage
        knows: the epoch is over then.
        """
        began_s = monotonic_s()
        if plan.num_tokens > self.token_budget:
            raise ProtocolError(
                f"step {plan.step} has {plan.num_tokens} tokens, the budget is {self.token_budget}"
            )
        if plan.moves:
            self._runner.move(plan.moves)
        for opened in plan.opens:
            self._open_sequences.open(opened)
            self._slots.open(opened)
            if self.is_last and self._pooling is None:
                self._sampled[opened.seq] = self._sampler.open(opened)
                if (prompt := scored_prompt(opened)) is not None:
                    self._scored[opened.seq] = prompt
        spans, ids = self._extend(plan)
        x = self._input(ids, hidden)
        adapters = self._adapters.rows_of(plan)
        if self._pooling is not None:
            out: Tensor | StepResult = self._pooled(plan, spans, x, adapters, began_s)
        elif self.is_last:
            out = self._answer(plan, spans, x, adapters, began_s)
        else:
            out = self._states(spans, x, adapters)
        self._slots.keep(plan.snapshots)
        for seq in plan.closes:
            self._open_sequences.close(seq)
            self._slots.close(seq)
            self._adapters.close(seq)
            self._sampled.pop(seq, None)
            self._scored.pop(seq, None)
        return out

    def _extend(self, plan: StepPlan) -> tuple[list[Span], list[int]]:
        spans: list[Span] = []
        ids: list[int] = []
        for row, known in self._open_sequences.extend(plan):
            state = self._slots.of(row.seq)
            spans.append(Span(start=row.start, length=row.length, blocks=known.blocks, state=state))
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

    def _states(self, spans: list[Span], x: Tensor, adapters: AdapterRows) -> Tensor:
        if not spans:  # a step that only closes sequences
            return torch.empty(0, self.info.hidden_size, dtype=self.dtype)
        return self._runner.run(Pass(kind=PassKind.HIDDEN, spans=spans, adapters=adapters), x)

    def _pooled(
        self,
        plan: StepPlan,
        spans: list[Span],
        x: Tensor,
        adapters: AdapterRows,
        began_s: float,
    ) -> StepResult:
        """A vector for each row of the plan: a whole text. One that is not finite is empty."""
        assert self._pooling is not None
        for row, span in zip(plan.rows, spans, strict=True):
            if span.start or span.length != len(self._open_sequences.ids_of(row.seq)):
                raise ProtocolError(f"sequence {row.seq} comes in parts, a text is pooled whole")
        dimensions = [self._open_sequences.dimensions_of(row.seq) for row in plan.rows]
        states = self._states(spans, x, adapters)
        vectors = tuple(self._pooling.vectors(states, spans, dimensions))
        took_s = monotonic_s() - began_s
        return StepResult(plan.step, (), (), (), took_s, plan.refused, vectors=vectors)

    def _answer(
        self,
        plan: StepPlan,
        spans: list[Span],
        x: Tensor,
        adapters: AdapterRows,
        began_s: float,
    ) -> StepResult:
        sampled, sequences = self._sampled_rows(plan)
        scored = self._scored_rows(plan) if self._scored else []
        rows = merged_rows(sampled, scored) if scored else sampled
        if rows:
            what = Pass(kind=PassKind.SAMPLED, spans=spans, rows=rows, adapters=adapters)
            logits = self._runner.run(what, x)
            scores = [score(logits[_places(rows, each.rows)], each) for each in scored]
            if scored:
                logits = logits[_places(rows, sampled)]
            drafts = [row.drafts for row in plan.rows if row.wants] if plan.num_drafts else None
            found = self._sampler.sample(logits, sequences, drafts)
            unscored = zip(scored, scores, strict=True)
            bad = [(each.seq, NOT_FINITE) for each, found in unscored if found is None]
            return StepResult(
                plan.step,
                found.tokens,
                found.logprobs,
                found.bad,
                monotonic_s() - began_s,
                (*plan.refused, *found.refused, *bad),
                found.forced,
                tuple(each for each in scores if each is not None),
            )
        if spans:
            self._runner.run(Pass(kind=PassKind.WRITE, spans=spans, adapters=adapters), x)
            self._device.synchronize()  # an answer reports a computed step and its duration
        return StepResult(plan.step, (), compute_s=monotonic_s() - began_s, refused=plan.refused)

    def _scored_rows(self, plan: StepPlan) -> list[ScoredRows]:
        """Returns the packed rows that are followed by tokens to score."""
        scored: list[ScoredRows] = []
        first = 0
        for row in plan.rows:
            prompt = self._scored.get(row.seq)
            if prompt is not None and (rows := prompt.rows_of(row, first)) is not None:
                scored.append(rows)
            first += row.length
        return scored

    def _sampled_rows(self, plan: StepPlan) -> tuple[list[int], list[SampledSequence]]:
        """Returns the packed rows after which a token may be sampled, and the sequences that want
        one."""
        rows: list[int] = []
        sequences: list[SampledSequence] = []
        end = 0
        for row in plan.rows:
            end += row.length
            sequence = self._sampled[row.seq]
            if row.ids and row.start != sequence.num_known:
                raise ProtocolError(
                    f"sequence {row.seq} goes on behind {row.start} tokens, "
                    f"but {sequence.num_known} came true"
                )
            sequence.extend(row.ids)
            if row.wants:
                rows += range(end - 1 - len(row.drafts), end)
                sequences.append(sequence)
        return rows, sequences


def _places(rows: list[int], some: Sequence[int]) -> list[int]:
    """Returns where some of these rows, which are ascending, stand among them."""
    return [bisect_left(rows, row) for row in some]


def _packing(load: ForwardLoad, loaded: LoadedForward) -> str:
    """Names what a row's bits depend on: the packing, and the number of ranks if it matters."""
    name = load.packing.name
    return name if loaded.num_ranks == 1 else f"{name} {loaded.num_ranks} ranks"


def _grammars(info: ModelInfo) -> Callable[[], Grammars]:
    """Starts to read the vocabulary in parallel with the weights."""
    return GrammarLoad(info.path, vocab_size=info.vocab_size, eos_ids=info.eos_ids).result
