"""The Celery app that Flower watches through. It knows the broker; it runs no task and imports no
service."""

from celery import Celery

from shardline.base.config import Settings
from shardline.base.errors import Invalid
from shardline.base.redis_url import RedisAddress
from shardline.contract.queues import celery_settings
from shardline_server.refusals import refusing


def make_app(settings: Settings) -> Celery:
    """Raises Invalid for an address that Flower cannot reach."""
    address = RedisAddress.parse(settings.redis_url)
    if address.sentinel is not None and address.db:
        problem = "Flower (2.2) looks into database 0 of a server that Sentinels know"
        raise Invalid("redis_url", problem, "Use database 0")
    if address.path is not None and (address.db or address.username):
        problem = "Flower (2.2) looks into database 0 of a unix socket, as the default user"
        raise Invalid(
            "redis_url", problem, "Give Flower the server's port, or leave database and user out"
        )
    app = Celery("shardline")
    app.conf.update(celery_settings(settings))
    return app


with refusing():
    app = make_app(Settings())
