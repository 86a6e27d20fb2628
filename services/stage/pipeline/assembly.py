"""Forms a pipeline once: binds the stages behind a head and wires them. Owns the handshake; knows
no thread.

Stages are called one by one in the order of the layers, so that two heads that race meet at the
first and none holds what the other waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from uuid import UUID

from services.stage.hop import Channel, Hop, Kind
from services.stage.hop.sockets import SocketFactory
from services.stage.hop.wiring import Member, Wiring
from services.stage.pipeline import messages
from services.stage.pipeline.control_client import ControlClient, StageRefusal
from services.stage.pipeline.route import choose_route
from shardline.base.clock import monotonic_s
from shardline.base.errors import LinkLost
from shardline.contract.fleet.lanes import MAX_LANES
from shardline.contract.wire import StageCard
from shardline_server.failpoints import Point, failpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class AssembledPipeline:
    """A pipeline that is ready: its control links, and the head's own wiring."""

    clients: tuple[ControlClient, ...]
    wiring: Wiring

    def release(self) -> None:
        """Frees the stages. The wiring's ends are the engine's to close."""
        goodbye = messages.Bye(pipeline=self.wiring.pipeline, epoch=self.wiring.epoch)
        for client in self.clients:
            client.close(goodbye)


@dataclass(frozen=True, slots=True)
class _BoundStage:
    client: ControlClient
    welcome: messages.Welcome


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineAssembly:
    """What every attempt of a head has in common. `next_epoch` raises Unavailable while Postgres is
    unreachable, and Conflict while the pipeline is another head's."""

    pipeline: UUID
    card: StageCard
    sockets: SocketFactory
    hop: Hop
    timeout_s: float
    """Of each answer."""
    num_lanes: int | None
    """The number that the links ask for, unless set."""
    next_epoch: Callable[[], int]
    far_int8: bool = False
    """Whether activations are int8 on their way to another machine."""

    def form(self, cards: list[StageCard]) -> AssembledPipeline:
        """Raises Unavailable, Conflict, LinkLost or Refused with what is in the way; then nothing
        is held any more."""
        # No epoch is spent without a route.
        choose_route(self.card, cards, pipeline=str(self.pipeline), refused={})
        epoch = self.next_epoch()
        bound: dict[str, _BoundStage] = {}
        with ExitStack() as undo:
            undo.callback(self._release, bound, epoch)
            route = self._bind(cards, epoch, bound)
            failpoint(Point.HELLO_SENT)
            members = [bound.pop(card.incarnation) for card in route]
            undo.callback(
                self._release, {member.client.card.incarnation: member for member in members}, epoch
            )
            self._release(bound, epoch)
            bound.clear()
            wiring = self._wire(members, epoch, undo)
            undo.pop_all()
        return AssembledPipeline(clients=tuple(member.client for member in members), wiring=wiring)

    def _bind(
        self, cards: list[StageCard], epoch: int, bound: dict[str, _BoundStage]
    ) -> list[StageCard]:
        """Calls stages until those in `bound` hold all layers; the next candidate when one refuses.
        Those bound already are pinged in between, or they would take a head that waits for others
        for a silent one."""
        refused: dict[str, str] = {}
        while True:
            route = choose_route(
                self.card, cards, pipeline=str(self.pipeline), refused=refused, prefer=bound
            )
            card = next((card for card in route if card.incarnation not in bound), None)
            if card is None:
                return route
            for member in bound.values():
                member.client.send(messages.Ping(pipeline=self.pipeline, epoch=epoch, seq=0))
            try:
                bound[card.incarnation] = self._hello(card, epoch)
            except (LinkLost, StageRefusal) as error:
                refused[card.incarnation] = str(error)

    def _hello(self, card: StageCard, epoch: int) -> _BoundStage:
        client = ControlClient(self.sockets, card, self.timeout_s)
        try:
            client.send(
                messages.Hello(
                    pipeline=self.pipeline,
                    epoch=epoch,
                    head=self.card.worker,
                    model=self.card.model,
                    fingerprint=self.card.fingerprint,
                    dtype=self.card.dtype,
                    first_layer=card.first_layer,
                    last_layer=card.last_layer,
                    max_lanes=self.num_lanes or max(MAX_LANES, self.card.num_layers),
                )
            )
            return _BoundStage(client, client.expect(messages.Welcome, self.timeout_s))
        except (LinkLost, StageRefusal):
            client.close(messages.Bye(pipeline=self.pipeline, epoch=epoch))
            raise

    def _wire(self, members: list[_BoundStage], epoch: int, undo: ExitStack) -> Wiring:
        num_stages = len(members) + 1
        stages = self._describe([self.card, *(member.welcome.card for member in members)])
        capacities = [stage.card.capacity for stage in stages]
        num_blocks = min(capacity.num_blocks for capacity in capacities)
        num_lanes = self.num_lanes or (max(MAX_LANES, num_stages) if members else 1)
        receiver = sender = None
        if members:
            results = Channel(
                pipeline=self.pipeline, epoch=epoch, kind=Kind.RESULT, num_lanes=num_lanes
            )
            plans = Channel(
                pipeline=self.pipeline, epoch=epoch, kind=Kind.PLAN, num_lanes=num_lanes
            )
            receiver = self.hop.open_receiver(results)
            undo.callback(receiver.close)
            self._start(
                members,
                stages[1:],
                receiver.address,
                epoch=epoch,
                num_lanes=num_lanes,
                num_blocks=num_blocks,
            )
            sender = self.hop.open_sender(plans, members[0].welcome.address, self.timeout_s)
            undo.callback(sender.close)
        deadline = monotonic_s() + self.timeout_s
        for member in members:
            member.client.expect(messages.Ready, max(0.0, deadline - monotonic_s()))
        return Wiring(
            pipeline=self.pipeline,
            epoch=epoch,
            stage_index=0,
            num_stages=num_stages,
            num_lanes=num_lanes,
            num_blocks=num_blocks,
            receiver=receiver,
            sender=sender,
            sends_int8=stages[0].sends_int8,
            first_lanes=None if self.num_lanes else num_stages,
            num_slots=min(capacity.num_slots for capacity in capacities),
            num_states=min((each.num_states for each in capacities if each.num_states), default=0),
            move_s=max(capacity.move_us for capacity in capacities) / 1e6,
            members=tuple(stages),
        )

    def _describe(self, cards: list[StageCard]) -> list[Member]:
        """Returns all stages in order."""
        is_far = [one.machine != other.machine for one, other in pairwise(cards)]
        return [
            Member(card=card, sends_int8=self.far_int8 and far)
            for card, far in zip(cards, [*is_far, False], strict=True)
        ]

    def _start(
        self,
        members: list[_BoundStage],
        stages: list[Member],
        results: str,
        *,
        epoch: int,
        num_lanes: int,
        num_blocks: int,
    ) -> None:
        addresses = [*(member.welcome.address for member in members[1:]), results]
        for place, (member, stage, address) in enumerate(
            zip(members, stages, addresses, strict=True), start=1
        ):
            member.client.send(
                messages.Start(
                    pipeline=self.pipeline,
                    epoch=epoch,
                    place=place,
                    num_stages=len(members) + 1,
                    num_lanes=num_lanes,
                    num_blocks=num_blocks,
                    next_address=address,
                    sends_int8=stage.sends_int8,
                )
            )

    def _release(self, bound: dict[str, _BoundStage], epoch: int) -> None:
        for member in bound.values():
            member.client.close(messages.Bye(pipeline=self.pipeline, epoch=epoch))
