"""`python -m services.gateway.batches`: processes batches without a door, until SIGTERM. It is
for installations without a gateway, in which producers connect to Postgres only."""

from __future__ import annotations

import asyncio
import signal

import structlog

from services.gateway.batches.batch_keeper import BatchKeeper
from services.gateway.context import Gateway
from services.gateway.settings import GatewaySettings
from shardline.base import log
from shardline.base.type_info import prepare_loaded
from shardline.store.connection.database_url import normalize
from shardline_server.refusals import refusing


async def keep(settings: GatewaySettings) -> None:
    """Goes on with batches until SIGTERM or SIGINT."""
    stopping = asyncio.Event()
    for one in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(one, stopping.set)
    gateway = Gateway.make(settings)
    gateway.start()
    keeper = BatchKeeper(gateway)
    keeper.start()
    try:
        await stopping.wait()
    finally:
        await keeper.close()
        await gateway.close()


def main() -> None:
    """Run one keeper."""
    with refusing():
        settings = GatewaySettings()
        normalize(settings.database_url.get_secret_value())
    log.configure(service="gateway", level=settings.log_level, form=settings.log_format)
    prepare_loaded()
    structlog.get_logger(__name__).info("batch keeper starting")
    asyncio.run(keep(settings))


if __name__ == "__main__":
    main()
