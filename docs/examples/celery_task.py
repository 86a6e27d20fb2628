"""From any service that has Celery: no import of Shardline, no Postgres. Accepted when a relay has
stored it.

With a result backend (SHARDLINE_RESULT_BACKEND of relays and stages, and here),
`AsyncResult.get()` returns the completion.
"""

import os
from uuid import uuid4

from celery import Celery

backend = os.environ.get("SHARDLINE_RESULT_BACKEND")
app = Celery("producer", broker=os.environ["SHARDLINE_REDIS_URL"], backend=backend)

request = {"model": "clerk", "prompt": "date: 3 March 2021 =", "temperature": 0}
task = app.send_task(
    "shardline.submit", kwargs=request, task_id=str(uuid4()), queue="shardline.intake"
)
print(task.id, task.get(timeout=60)["text"] if backend else "")
