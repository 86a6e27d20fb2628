"""From Python: submit, wait, stream. Accepted when `submit` returns."""

from shardline import Client

with Client() as client:
    job_id = client.submit("clerk", "date: 3 March 2021 =", max_tokens=16, temperature=0)
    job = client.wait(job_id, timeout_s=60)
    print(job.id, job.result.text)

    for delta in client.stream(client.submit("clerk", "words: 417 =", temperature=0)):
        print(delta.text, end="", flush=True)
    print()

    ids = client.submit_many(
        {"model": "clerk", "prompt": f"words: {n} =", "temperature": 0} for n in range(10)
    )
    for job in client.wait(ids, timeout_s=60):
        print(job.id, job.result.text)
