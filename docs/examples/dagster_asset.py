"""A Dagster asset: answers to a table's rows, each under a key of its own.

A run that is retried, or resumed after a crash, asks for no row twice: a repeated key returns the
job that is there. `dagster dev -f docs/examples/dagster_asset.py` shows it; the program itself
materializes it once.
"""

from dagster import RetryPolicy, asset, materialize

from shardline import Client

ORDERS = {1: "sort: 31, 4, 15 =", 2: "date: 3 March 2021 ="}


@asset(retry_policy=RetryPolicy(max_retries=3))
def answers(context):
    with Client() as client:
        jobs = [
            client.submit("clerk", prompt, temperature=0, idempotency_key=f"order-{number}")
            for number, prompt in ORDERS.items()
        ]
        return {str(job): client.wait(job, timeout_s=60).result.text for job in jobs}


if __name__ == "__main__":
    result = materialize([answers])
    print(result.output_for_node("answers"))
