"""A Flask service: one route sends plain Celery tasks, the other reads the rows.

`flask --app docs/examples/flask_celery run` serves it; the program itself asks once.
"""

import os
from uuid import uuid4

import psycopg
from celery import Celery
from flask import Flask, request

app = Flask(__name__)
celery = Celery("shop", broker=os.environ["SHARDLINE_REDIS_URL"])

ANSWER = """
SELECT jobs.state, results.text FROM jobs LEFT JOIN results ON results.job_id = jobs.id
WHERE jobs.id = %s
"""


@app.post("/dates")
def ask():
    job_id = str(uuid4())
    prompt = f"date: {request.json['date']} ="
    celery.send_task(
        "shardline.submit",
        kwargs={"model": "clerk", "prompt": prompt, "temperature": 0},
        task_id=job_id,
        queue="shardline.intake",
    )
    return {"id": job_id}, 202


@app.get("/dates/<uuid:job_id>")
def answer(job_id):
    with psycopg.connect(os.environ["SHARDLINE_DATABASE_URL"]) as connection:
        row = connection.execute(ANSWER, (job_id,)).fetchone()
    # A relay stores the task a moment after it was sent.
    return {"state": row[0], "text": row[1]} if row else {"state": "sent", "text": None}


if __name__ == "__main__":
    browser = app.test_client()
    print(browser.post("/dates", json={"date": "3 March 2021"}).json["id"])
