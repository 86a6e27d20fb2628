"""The Celery app that Flower watches through. It knows the broker; it runs no task and imports no service."""

from celery import Celery

from shardline.config import Settings
from shardline.queues import celery_settings

app = Celery("shardline")
app.conf.update(celery_settings(Settings()))
