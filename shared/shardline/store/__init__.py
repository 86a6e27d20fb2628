"""Postgres, the truth: all SQL lives here and nowhere else. Knows no service, no Redis and no
tokenizer.

Every function takes a SQLAlchemy `Connection` and leaves COMMIT to its caller. From asyncio:
`await connection.run_sync(jobs.insert_jobs, requests)`, which runs the same statements on an
`AsyncConnection`. Every UPDATE is conditional on the state that it leaves; time is Postgres's now()
only. Rows of `jobs` are locked in order of id or with SKIP LOCKED; each module that takes locks
lists them in its docstring.
"""
