"""How the ranks of a stage agree on the memory that each takes: the first divides, the others
follow."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from services.stage.attention.offload_area import OffloadArea
from services.stage.attention.paged_kv import KvShape, PagedKv
from services.stage.engine.memory import Limits, StageMemory, WeightBytes
from services.stage.ranks.group import RankGroup
from services.stage.recurrent.states import RecurrentStates, StateShapes


class TellingMemory:
    """The first rank's: what all take together is what one process would take."""

    def __init__(self, memory: StageMemory, group: RankGroup) -> None:
        self._memory = memory
        self._group = group

    def fit_weights(self, weights: WeightBytes) -> tuple[int, ...]:
        """Chooses the streamed layers as `StageMemory` does; tells how many they are."""
        streamed = self._memory.fit_weights(weights)
        self._group.tell(len(streamed))
        return streamed

    def make_states(self, shapes: Mapping[int, StateShapes]) -> RecurrentStates:
        """Allocates none: ranks compute no recurrent layers."""
        return RecurrentStates(shapes, 0)

    def make_kv(
        self, kv_shapes: Mapping[int, KvShape], dtype: torch.dtype, *, context: int
    ) -> PagedKv:
        """Allocates this rank's share of what `StageMemory` finds room for; tells the number of KV
        blocks."""
        kv = self._memory.make_kv(
            kv_shapes, dtype, context=context, num_ranks=self._group.num_ranks
        )
        self._group.tell(kv.num_blocks)
        return kv

    def make_offload_area(self, kv: PagedKv) -> OffloadArea:
        """Allocates as `StageMemory` does, this rank's share."""
        return self._memory.make_offload_area(kv, num_ranks=self._group.num_ranks)


class ToldMemory:
    """Another rank's."""

    def __init__(self, group: RankGroup, limits: Limits) -> None:
        """`limits` are the stage's."""
        self._group = group
        self._limits = limits

    def fit_weights(self, weights: WeightBytes) -> tuple[int, ...]:
        """Learns which layers are streamed."""
        return weights.spread(self._group.tell(None))

    def make_states(self, shapes: Mapping[int, StateShapes]) -> RecurrentStates:
        """Allocates none: ranks compute no recurrent layers."""
        return RecurrentStates(shapes, 0)

    def make_kv(
        self,
        kv_shapes: Mapping[int, KvShape],
        dtype: torch.dtype,
        *,
        context: int,  # noqa: ARG002 (the first rank knows it)
    ) -> PagedKv:
        """Learns the number of KV blocks and allocates this rank's share of them."""
        return PagedKv(layers=kv_shapes, num_blocks=self._group.tell(None), dtype=dtype)

    def make_offload_area(self, kv: PagedKv) -> OffloadArea:
        """Allocates this rank's share of the slots: the number that the first rank has."""
        return OffloadArea(
            kv, self._limits.offload_bytes // self._group.num_ranks, self._limits.offload_folder
        )
