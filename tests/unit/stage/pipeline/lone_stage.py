"""A stage in a process of its own, for tests that kill or pause it. Prints its card, lives until
its input ends."""

from __future__ import annotations

import sys

import msgspec

from services.stage.hop.sockets import Sockets
from shardline.base.config import Times
from shardline.contract.wire import encode_card
from tests.links import NUM_LAYERS, Stage, make_card


def main() -> None:
    """The protocol's times come as JSON in the first argument."""
    times = Times(**msgspec.json.decode(sys.argv[1]))
    stage = Stage(Sockets(bind="tcp://127.0.0.1"), make_card(8, NUM_LAYERS), times)
    print(encode_card(stage.link.card()).decode(), flush=True)
    sys.stdin.read()
    stage.close()


if __name__ == "__main__":
    main()
