"""Whether equal questions have equal numbers, whichever door they came by and whatever died. Plain
SQL: knows nothing of the product's code, only its tables."""

from __future__ import annotations

import psycopg

from tests.chaos.report.finding import Finding

# Exact results of one exactness have the same bits; the name of a question is its caller's.
GROUPS = """
SELECT min(jobs.id::text)::uuid, count(DISTINCT (choice, probability, confidence, score,
    probabilities, label_mass)), jobs.params -> 'question'
FROM jobs JOIN results ON results.job_id = jobs.id
WHERE jobs.params -> 'question' IS NOT NULL AND state = 'succeeded'
    AND results.exact
GROUP BY model, jobs.params -> 'adapter', jobs.params -> 'question', prompt_ids,
    results.provenance #>> '{adapter,fingerprint}', results.provenance ->> 'exactness'
"""
WITHOUT = """
SELECT jobs.id FROM jobs JOIN results ON results.job_id = jobs.id
WHERE jobs.params -> 'question' IS NOT NULL AND state = 'succeeded'
    AND (results.choice IS NULL OR results.label_mass IS NULL)
"""


def changed_decisions(database_url: str) -> list[Finding]:
    """I2: two answers to one question about one prompt, or an answer without numbers."""
    with psycopg.connect(database_url) as connection:
        groups = connection.execute(GROUPS).fetchall()
        without = connection.execute(WITHOUT).fetchall()
    changed = [
        Finding(
            invariant="I2",
            count="decision_mismatches",
            what=f"{question} has {num} different answers about one prompt",
            job_id=job_id,
        )
        for job_id, num, question in groups
        if num > 1
    ]
    missing = [
        Finding(
            invariant="I2", count="decision_mismatches", what="it has no numbers", job_id=job_id
        )
        for (job_id,) in without
    ]
    return [*changed, *missing]
