"""The independent judge: plain SQL, what readers saw, and what came of the undisturbed run. Knows
nothing of the product's code, only its tables.

I1 every accepted job ends in one state that it may end in; I2 one result, equal to the undisturbed
run's (`bits`); I3 nothing was written by a stale fence; I8 nothing is stuck; I9 what was streamed
is never retracted, without gap or repeat; I11 a repeat gives the job that is there, and what is
beyond a limit is none (`producer` and `limit_prober` hear that at the doors).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import UUID

import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from tests.chaos.judge.bits import Row, changed, moved, retracted, unequal
from tests.chaos.load.journal import Asked, Watched
from tests.chaos.load.undisturbed import Expected
from tests.chaos.load.workload import BEYOND, MARK
from tests.chaos.report.finding import Finding

CRASHED = "crashed"
TERMINAL = frozenset({"succeeded", "failed", "cancelled", "expired"})

JOBS = """
SELECT jobs.id, state, jobs.fence, error, results.token_ids, results.text, results.logprobs,
    results.fence AS result_fence, results.exact, results.finish_reason,
    results.provenance #>> '{adapter,fingerprint}' AS adapter,
    results.provenance ->> 'exactness' AS exactness, results.tool_calls,
    results.embedding, results.score,
    jobs.params -> 'tools' IS NOT NULL AS has_tools,
    CASE WHEN choice IS NOT NULL THEN jsonb_build_array(
        choice, probability, confidence, score, probabilities, label_mass) END AS decision
FROM jobs LEFT JOIN results ON results.job_id = jobs.id WHERE jobs.id = ANY(%s)
"""
TWICE = """
SELECT job_id, 'result rows' AS what, count(*) AS num FROM results WHERE job_id = ANY(%(ids)s)
    GROUP BY job_id HAVING count(*) > 1
UNION ALL
SELECT job_id, 'attempts that ended it', count(*) FROM attempts
    WHERE job_id = ANY(%(ids)s) AND outcome IN ('succeeded', 'failed', 'cancelled', 'expired')
    GROUP BY job_id HAVING count(*) > 1
"""
STRANGERS = "SELECT id FROM jobs WHERE metadata @> %(mark)s AND NOT id = ANY(%(ids)s)"
ADMITTED = "SELECT id, state, params FROM jobs WHERE metadata @> %s AND state <> 'failed'"
ATTEMPTS = """
SELECT attempts.job_id, attempts.fence, outcome, tokens, logprobs, num_resumed, attempts.exactness,
    jobs.state, jobs.fence AS last_fence,
    attempts.ended_at < attempts.heartbeat_at AS beats_after_its_end,
    lead(num_resumed) OVER (PARTITION BY attempts.job_id ORDER BY attempts.fence) AS next_resumed
FROM attempts JOIN jobs ON jobs.id = attempts.job_id WHERE jobs.id = ANY(%s)
ORDER BY attempts.job_id, attempts.fence
"""


def judge(
    database_url: str,
    asked: Sequence[Asked],
    watched: Sequence[Watched],
    expected: Sequence[Expected] | None,
) -> list[Finding]:
    """All violations that rows and streams show. `expected` is of each request of the set,
    undisturbed; without it each job is held to what it saved itself, and to others of its request
    and exactness."""
    ids = [each.id for each in asked]
    with psycopg.connect(database_url, row_factory=dict_row) as connection:
        # One snapshot: where jobs still run, rows and attempts of two moments do not fit each
        # other.
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        rows = {row["id"]: row for row in connection.execute(JOBS, (ids,))}
        attempts = connection.execute(ATTEMPTS, (ids,)).fetchall()
        twice = connection.execute(TWICE, {"ids": ids}).fetchall()
        strangers = connection.execute(STRANGERS, {"mark": Jsonb(MARK), "ids": ids}).fetchall()
        beyond = connection.execute(ADMITTED, (Jsonb(BEYOND),)).fetchall()
    if expected is None:
        wanted = own(rows, attempts)
        watched = [each for each in watched if each.job_id not in moved(attempts)]
    else:
        wanted = {each.id: expected[each.number] for each in asked}
    return [
        *lost(asked, rows),
        *duplicated(twice, strangers),
        *changed(rows, attempts, wanted),
        *unequal([(each.number, rows[each.id]) for each in asked if each.id in rows]),
        *stale(rows, attempts),
        *blamed(attempts),
        *retracted(watched, rows, wanted),
        *admitted(beyond),
    ]


def admitted(rows: Sequence[Row]) -> list[Finding]:
    """I11: jobs that were asked for beyond a limit. Rows of SQL, which no door has checked, must
    have failed."""
    return [
        Finding(
            invariant="I11",
            count="admitted",
            what=f"{row['params']} is {row['state']}",
            job_id=row["id"],
        )
        for row in rows
    ]


def own(rows: Mapping[UUID, Row], attempts: Sequence[Row]) -> Mapping[UUID, Expected]:
    """Of each job: the result's tokens, or without one those of the newest attempt, which stand in
    that order."""
    saved = {attempt["job_id"]: attempt["tokens"] for attempt in attempts}
    return {
        job_id: Expected(
            tokens=saved.get(job_id, []) if row["token_ids"] is None else row["token_ids"],
            adapter=row["adapter"],
        )
        for job_id, row in rows.items()
    }


def lost(asked: Sequence[Asked], rows: Mapping[UUID, Row]) -> list[Finding]:
    """I1, I8: an accepted job that is not there, has not ended, or ended in a state that nothing
    explains.

    `exhausted`: its heads died under it as often as `max_crashes` allows, though nothing of it
    kills them.
    """
    found = []
    for each in asked:
        row = rows.get(each.id)
        count = "lost"
        if row is None:
            what = (
                f"{each.door} promised it, and there is no row"
                if each.promised
                else f"no row through {each.door}"
            )
        elif row["state"] not in TERMINAL:
            what = f"it is still {row['state']}"
        elif row["state"] not in each.ends:
            what = f"{each.door}, request {each.number}: it ended {row['state']}: {row['error']}"
            count = "exhausted" if (row["error"] or {}).get("code") == CRASHED else "lost"
        elif row["state"] == "succeeded" and row["token_ids"] is None:
            what = "it succeeded without a result"
        else:
            continue
        found.append(Finding(invariant="I1", count=count, what=what, job_id=each.id))
    return found


def duplicated(twice: Sequence[Row], strangers: Sequence[Row]) -> list[Finding]:
    """I2: two results, two ends, or a job that nobody asked for."""
    return [
        *(
            Finding(
                invariant="I2",
                count="duplicated",
                what=f"{row['num']} {row['what']}",
                job_id=row["job_id"],
            )
            for row in twice
        ),
        *(
            Finding(
                invariant="I2", count="duplicated", what="nobody asked for it", job_id=row["id"]
            )
            for row in strangers
        ),
    ]


def stale(rows: Mapping[UUID, Row], attempts: Sequence[Row]) -> list[Finding]:
    """I3: what only a holder without the newest fence can have written."""
    found = []
    for job_id, row in rows.items():
        if row["result_fence"] not in (None, row["fence"]):
            what = f"the result has fence {row['result_fence']}, the job {row['fence']}"
            found.append(Finding(invariant="I3", count="stale_commits", what=what, job_id=job_id))
    fences: dict[UUID, list[int]] = {job_id: [] for job_id in rows}
    for attempt in attempts:
        fences[attempt["job_id"]].append(attempt["fence"])
        found += [
            Finding(invariant="I3", count="stale_commits", what=what, job_id=attempt["job_id"])
            for what in _stale_in(attempt)
        ]
    for job_id, row in rows.items():
        if fences[job_id] != list(range(1, row["fence"] + 1)):
            what = f"the job has fence {row['fence']}, its attempts {fences[job_id]}"
            found.append(Finding(invariant="I3", count="stale_commits", what=what, job_id=job_id))
    return found


def _stale_in(attempt: Row) -> list[str]:
    fence = attempt["fence"]
    outcome = attempt["outcome"]
    found = []
    if fence < attempt["last_fence"] and (outcome is None or outcome in TERMINAL):
        found.append(f"fence {fence} of {attempt['last_fence']} has outcome {outcome}")
    if fence == attempt["last_fence"] and outcome in TERMINAL and outcome != attempt["state"]:
        found.append(f"its last attempt is {outcome}, the job is {attempt['state']}")
    if fence == attempt["last_fence"] and outcome is None and attempt["state"] in TERMINAL:
        found.append(f"the job is {attempt['state']}, its last attempt has no outcome")
    if attempt["beats_after_its_end"]:
        found.append(f"fence {fence} wrote a heartbeat after its end")
    if attempt["next_resumed"] not in (None, len(attempt["tokens"])):
        found.append(
            f"fence {fence} has {len(attempt['tokens'])} tokens,"
            f" the next one resumed from {attempt['next_resumed']}"
        )
    return found


def blamed(attempts: Sequence[Row]) -> list[Finding]:
    """I1: an attempt that saved tokens of its own and was counted as a crash all the same; three of
    them end a job."""
    return [
        Finding(
            invariant="I1",
            count="blamed",
            what=f"fence {attempt['fence']} saved new tokens and was counted as a crash",
            job_id=attempt["job_id"],
        )
        for attempt in attempts
        if attempt["outcome"] == "crashed" and len(attempt["tokens"]) > attempt["num_resumed"]
    ]
