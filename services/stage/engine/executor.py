"""The torch side of a stage: runs StepPlans over its shard and its KV. Owns the packing of rows and their padding.

Allocates no KV block and decides nothing: the head's scheduler does. Knows no hop and no job.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor

from services.stage.engine import kernel
from services.stage.engine.attention import Attention, Batch, HeadShape, PagedKv, Span
from services.stage.engine.device import Device
from services.stage.engine.heads import probe_heads
from services.stage.engine.kv_cache import blocks_for
from services.stage.engine.model_info import ModelInfo
from services.stage.engine.roster import Roster
from services.stage.engine.sampler import SampledSequence, Sampler
from services.stage.engine.shard import Shard
from services.stage.engine.step import StepPlan, StepResult
from shardline.errors import Invalid, ProtocolError

PACKING_FACTOR = 1.05
"""While linears are packed, the largest exists twice."""


DEFAULT_KV_SHARE = 0.4
"""Of the memory that is free once the shard is loaded."""


class Executor:
    """One stage's shard with its KV. `run` is called by one thread only."""

    def __init__(
        self, shard: Shard, attention: Attention, kv: PagedKv, *, token_budget: int, max_open: int, min_rows: int
    ) -> None:
        self.shard, self.info, self.dtype = shard, shard.info, shard.dtype
        self.num_blocks, self.token_budget, self.min_rows = kv.num_blocks, token_budget, min_rows
        self.attention, self.kv, self._device = attention, kv, shard.device
        self.exact = False
        self.fingerprint = ""
        self._roster = Roster(num_blocks=kv.num_blocks, max_open=max_open, vocab_size=self.info.vocab_size)
        self._sampler = Sampler(vocab_size=self.info.vocab_size, eos_ids=self.info.eos_ids, device=shard.device)
        self._sampled: dict[int, SampledSequence] = {}
        attention.bind(kv)

    @classmethod
    def load(
        cls,
        *,
        model: str | Path | ModelInfo,
        layers: range,
        device: Device,
        dtype: str,
        kv_bytes: int | None,
        token_budget: int,
        max_open: int,
    ) -> Executor:
        """Loads, packs, probes. Raises Invalid, with the remedy, for what cannot be sharded or does not fit."""
        info = model if isinstance(model, ModelInfo) else ModelInfo.read(model)
        attention = Attention(kernel.load() if device.is_cpu else None)
        with torch.inference_mode():
            shard = Shard.load(
                info,
                layers,
                dtype=device.dtype(dtype),
                attn_implementation=attention.name,
                device=device.torch_device,
                check_bytes=lambda num: _check_fits(num, kv_bytes, device),
            )
            heads = probe_heads(shard)
            num_blocks = _num_blocks(heads, kv_bytes, shard, max_open, device)
            kv = PagedKv(layers=heads, num_blocks=num_blocks, dtype=shard.dtype, device=device.torch_device)
        return cls(shard, attention, kv, token_budget=token_budget, max_open=max_open, min_rows=16)

    @property
    def blocks_used(self) -> int:
        """KV blocks in the tables of open sequences."""
        return self._roster.blocks_used

    @property
    def num_open(self) -> int:
        """Open sequences."""
        return len(self._roster)

    def reset(self) -> None:
        """A new epoch: forget every open sequence."""
        self._roster.clear()
        self._sampled.clear()

    @torch.inference_mode()
    def run(self, plan: StepPlan, hidden: Tensor | None) -> Tensor | StepResult:
        """Hidden states [T, H] for the next stage, or the tail's answer. Raises ProtocolError for a plan that does not
        fit what this stage knows: the epoch is over then."""
        began_s = time.perf_counter()
        if plan.num_tokens > self.token_budget:
            raise ProtocolError(f"step {plan.step} has {plan.num_tokens} tokens, the budget is {self.token_budget}")
        for opened in plan.opens:
            self._roster.open(opened)
            if self.shard.is_last:
                self._sampled[opened.seq] = self._sampler.open(opened)
        out = self._compute(plan, hidden, began_s)
        for seq in plan.closes:
            self._roster.close(seq)
            self._sampled.pop(seq, None)
        return out

    def _compute(self, plan: StepPlan, hidden: Tensor | None, began_s: float) -> Tensor | StepResult:
        spans: list[Span] = []
        ids: list[int] = []
        for row, known in self._roster.extend(plan):
            spans.append(Span(start=row.start, length=row.length, blocks=known.blocks))
            ids += known.ids[row.start : row.start + row.length] if row.length > 1 else (known.ids[row.start],)
        if not spans:
            return self._nothing(plan, began_s)
        batch = Batch.of(spans, min_rows=self.min_rows, device=self._device)
        x = self._input(ids, hidden, batch.num_rows)
        self.attention.use(batch)
        if self.shard.is_last:
            return self._answer(plan, x, batch.position.long(), began_s)
        return self.shard.hidden(x, batch.position.long())[: len(ids)]

    def _nothing(self, plan: StepPlan, began_s: float) -> Tensor | StepResult:
        """A step that only closes sequences."""
        if self.shard.is_last:
            return StepResult(plan.step, (), compute_s=time.perf_counter() - began_s)
        return torch.empty(0, self.info.hidden_size, dtype=self.dtype)

    def _input(self, ids: list[int], hidden: Tensor | None, num_rows: int) -> Tensor:
        """Ids or hidden states of the packed rows, padded with zeros to `num_rows`."""
        if self.shard.is_first:
            return torch.tensor(ids + [0] * (num_rows - len(ids)), dtype=torch.long).to(self._device)
        expected = (len(ids), self.info.hidden_size)
        if hidden is None or hidden.shape != expected or hidden.dtype != self.dtype:
            raise ProtocolError(f"activations of {expected} {self.dtype} are needed, not {_shown(hidden)}")
        if num_rows == len(ids):
            return hidden.to(self._device)
        padded = torch.zeros(num_rows, self.info.hidden_size, dtype=self.dtype, device=self._device)
        padded[: len(ids)] = hidden
        return padded

    def _answer(self, plan: StepPlan, x: Tensor, position: Tensor, began_s: float) -> StepResult:
        wanted: list[int] = []
        wants: list[SampledSequence] = []
        end = 0
        for row in plan.rows:
            end += row.length
            sampled = self._sampled[row.seq]
            sampled.extend(row.ids)
            if row.wants:
                wanted.append(end - 1)
                wants.append(sampled)
        if not wanted:
            self.shard.hidden(x, position)
            return StepResult(plan.step, (), compute_s=time.perf_counter() - began_s)
        padded = wanted + wanted[-1:] * (self.min_rows - len(wanted))
        logits = self.shard.logits(x, position, torch.tensor(padded, device=self._device))
        sample = self._sampler.sample(logits[: len(wanted)], wants)
        return StepResult(plan.step, sample.tokens, sample.logprobs, sample.bad, time.perf_counter() - began_s)


def _shown(hidden: Tensor | None) -> str:
    return "none" if hidden is None else f"{tuple(hidden.shape)} {hidden.dtype}"


def _check_fits(shard_bytes: int, kv_bytes: int | None, device: Device) -> None:
    kv_bytes = kv_bytes or 0
    needed, available = int(shard_bytes * PACKING_FACTOR) + kv_bytes, device.available_bytes()
    if needed > available:
        raise Invalid(
            "SHARDLINE_SPLIT",
            f"shard ({mib(shard_bytes)}) and its KV ({mib(kv_bytes)}) need {mib(needed)}, {mib(available)} are free",
            "Use more stages, fewer layers here, a smaller dtype or a smaller SHARDLINE_KV_MIB",
        )


def _num_blocks(heads: dict[int, HeadShape], kv_bytes: int | None, shard: Shard, max_open: int, device: Device) -> int:
    """What the KV budget holds; never more than all seats could use at full length."""
    block_bytes = PagedKv.bytes_per_block(heads, shard.dtype)
    if kv_bytes is None:
        kv_bytes = int(device.available_bytes() * DEFAULT_KV_SHARE)
    if kv_bytes < block_bytes:
        raise Invalid("SHARDLINE_KV_MIB", f"{mib(kv_bytes)} hold no KV block of {mib(block_bytes)}", "Give more memory")
    return min(kv_bytes // block_bytes, max_open * blocks_for(shard.info.context_length))


def mib(num_bytes: int) -> str:
    """For people."""
    return f"{num_bytes / 2**20:,.1f} MiB"
