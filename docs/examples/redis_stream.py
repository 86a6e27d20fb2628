"""From any language that speaks Redis: one XADD. Accepted when a relay has stored it.

Choose the id yourself: it is the job's id everywhere, and a request sent twice runs once.
"""

import json
import os
from uuid import uuid4

import redis

request = {"id": str(uuid4()), "model": "clerk", "prompt": "words: 417 =", "temperature": 0}
with redis.Redis.from_url(os.environ["SHARDLINE_REDIS_URL"]) as client:
    client.xadd("shardline:intake", {"request": json.dumps(request)})
print(request["id"])
