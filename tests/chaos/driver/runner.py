"""One chaos run: a stack, an undisturbed pass, load and faults, the judgment. Knows no particular
fault."""

from __future__ import annotations

import time
from collections.abc import Sequence

from shardline.store.connection.database import POOL_SIZE
from tests.chaos.driver.storm import Say, Storm, TargetT
from tests.chaos.faults.fault import Fault
from tests.chaos.judge import audit, growth, remains, secrecy
from tests.chaos.judge.batches import line_jobs, torn_batches
from tests.chaos.judge.calls import invalid_calls
from tests.chaos.judge.canvas import followed
from tests.chaos.judge.checker import judge
from tests.chaos.judge.choices import torn_choices
from tests.chaos.judge.decisions import changed_decisions
from tests.chaos.judge.emissions import stale_deltas
from tests.chaos.judge.responses import torn_responses
from tests.chaos.judge.tenants.rows import tenant_jobs
from tests.chaos.judge.tenants.tribunal import broken_tenants
from tests.chaos.judge.texts import torn_texts
from tests.chaos.load.journal import Asked, Watched
from tests.chaos.load.load import Load
from tests.chaos.load.target import Target
from tests.chaos.load.undisturbed import Compared, Expected, undisturbed
from tests.chaos.report.finding import Finding
from tests.chaos.report.report import Report, Struck, achieved, kinds
from tests.chaos.stack.local_start import local_target
from tests.chaos.stack.options import Options

NUM_OWN_CONNECTIONS = 2 * POOL_SIZE + 1
"""Of the load's clients, which are never closed."""


def run(
    options: Options, faults: Sequence[Fault], say: Say, *, max_faults: int | None = None
) -> Report:
    """One run against a stack of local processes."""
    with local_target(options) as target:
        return judged(options, target, faults, say, max_faults=max_faults)


def judged(
    options: Options,
    target: TargetT,
    faults: Sequence[Fault[TargetT]],
    say: Say,
    *,
    max_faults: int | None = None,
) -> Report:
    """Hurts a stack that is ready, and ends it. Violations are in the report."""
    say(f"the stack is ready after {target.start_s:.1f} s; running the set undisturbed")
    storm = Storm(target, faults, seed=options.seed, say=say)
    report = _hurt(options, target, storm, say, max_faults)
    results = {} if target.results is None else {"results": target.results.url}
    private = secrecy.secrets(target.database_url, {**target.urls, **results})
    findings = [*storm.findings, *target.end()]
    return report.with_findings([*findings, *secrecy.told(target.logs(), private)])


def _hurt(
    options: Options, target: TargetT, storm: Storm[TargetT], say: Say, max_faults: int | None
) -> Report:
    """Everything that needs the stack alive."""
    audit.install(target.database_url, lease_s=target.times.lease_s)
    expected = _undisturbed(target, options.compared)
    before_bytes = growth.redis_bytes(target.redis_url)
    load = Load(target, redis_lasts=options.redis_lasts, seed=options.seed, minutes=options.minutes)
    with growth.Memory(target) as memory:
        load.start()
        began_s = time.monotonic()
        storm.rage(duration_s=60 * options.minutes, max_faults=max_faults)
        storm.findings += _drain(load, target, options.patience_s, say)
    took_s = time.monotonic() - began_s
    canvases = followed(target, load.disturbed_s())
    storm.findings += canvases.findings
    num_leaked, leaks = remains.kv_leaked(target, num_replicas=options.replicas)
    storm.findings += [*leaks, *memory.findings()]
    storm.findings += growth.in_redis(target.redis_url, target.database_url, before_bytes)
    storm.findings += _stopped(target, load)
    held = load.held()
    lines = line_jobs(target.database_url, load.batches())
    of_tenants = tenant_jobs(target.database_url)
    asked = [*target.journal.everything(), *held, *lines, *of_tenants]
    readers = target.journal.readers()
    storm.findings += _broken_promises(target, asked, readers, expected)
    by_state, num_tokens = achieved(
        target.database_url, [each.id for each in asked if each.door != "calm"]
    )
    return Report(
        seed=options.seed,
        minutes=options.minutes,
        dtype=options.dtype,
        stages=options.stages,
        load=target.workload.name,
        adapters=options.adapters,
        faults=kinds(storm.struck),
        num_faults=len(storm.struck),
        num_kills=sum(each.is_kill for each in storm.struck),
        not_run=storm.not_run,
        accepted=sum(by_state.values()),
        succeeded=by_state["succeeded"],
        failed_expected=sum(by_state[state] for state in ("cancelled", "expired", "failed")),
        held_back=len(held),
        batches=sum(each.has_ended for each in load.batches()),
        batch_lines=len(lines),
        tenant_jobs=len(of_tenants),
        tenants=load.tenants().counts(),
        followed=canvases.num_jobs,
        followed_loosely=canvases.num_excused,
        kv_blocks_leaked=num_leaked,
        worst_recovery_s=max((each.recovery_s or 0.0 for each in storm.struck), default=0.0),
        in_faults_s=sum(each.took_s for each in storm.struck),
        between_faults_s=_between_s(storm.struck),
        rss_growth_mb=memory.worst_mb,
        useful_tokens_per_s=num_tokens / took_s,
        streams_read=len(readers),
        streams_rejoined=sum(each.num_joins > 1 for each in readers),
        struck=storm.struck,
    )


def _between_s(struck: Sequence[Struck]) -> float:
    """What recoveries took, together."""
    return sum(max(each.recovery_s or 0.0, each.ended_s or 0.0) for each in struck)


def _stopped(target: Target, load: Load) -> list[Finding]:
    """What shows when the load has stopped: connections, batches, tenants."""
    load.stop()
    return [
        *_connections(target),
        *torn_batches(target.database_url, load.batches()),
        *broken_tenants(target.database_url, load.tenants()),
    ]


def _connections(target: Target) -> list[Finding]:
    """Those that the services opened and forgot; the load has stopped."""
    return growth.in_postgres(
        target.database_url,
        target.running(),
        num_own=NUM_OWN_CONNECTIONS,
        lease_s=target.times.lease_s,
    )


def _broken_promises(
    target: Target,
    asked: Sequence[Asked],
    readers: Sequence[Watched],
    expected: list[Expected] | None,
) -> list[Finding]:
    """What jobs and their readers did not get."""
    ids = [each.id for each in asked]
    lease_s = target.times.lease_s
    return [
        *target.journal.complaints(),
        *judge(target.database_url, asked, readers, expected),
        *torn_choices(target.database_url),
        *torn_responses(target.database_url, target.journal.responses()),
        *invalid_calls(target.database_url),
        *changed_decisions(target.database_url),
        *torn_texts(target.database_url, target.journal.texts(), expected),
        *audit.stale_writes(target.database_url),
        *stale_deltas(target.database_url, target.redis_url, ids, lease_s=lease_s),
    ]


def _undisturbed(target: Target, compared: Compared) -> list[Expected] | None:
    """The expected tokens; what they take is this machine's measure of a replay."""
    began_s = time.monotonic()
    expected = undisturbed(target, compared)
    target.calm_s = time.monotonic() - began_s
    return expected


def _drain(load: Load, target: Target, patience_s: float, say: Say) -> list[Finding]:
    """I8: everything ends. Which jobs have not, the judge tells."""
    is_quiet = load.drain(patience_s, say)
    findings = [
        Finding(invariant="I8", count="dead_threads", what=f"the load's {name} died")
        for name in load.dead()
    ]
    if not is_quiet:
        num_open = len(target.journal.open())
        what = f"{num_open} jobs have not ended {patience_s:.0f} s after the last fault"
        findings.append(Finding(invariant="I8", count="stuck", what=what))
    return findings
