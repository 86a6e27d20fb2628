"""One chaos run: a stack, an undisturbed pass, load and faults, the judgement. Knows no particular fault."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tests.faults import remains
from tests.faults.checker import Finding, judge
from tests.faults.fault import Fault
from tests.faults.load import Load, undisturbed
from tests.faults.report import Report, achieved, kinds
from tests.faults.storm import Say, Storm
from tests.faults.world import Options, World, a_world

DRAIN_S = 180.0


def run(options: Options, faults: Sequence[Fault], say: Say, *, max_faults: int | None = None) -> Report:
    """Raises only if the stack does not come up; violations are in the report."""
    with a_world(options) as world:
        say(f"the stack is ready after {world.start_s:.1f} s; running the set undisturbed")
        storm = Storm(world, faults, seed=options.seed, say=say)
        report = _hurt(world, options, storm, max_faults)
        family = remains.family(world)
        world.stack.end()
        left = remains.orphans(world.stack.home.folder, family)
    return report.with_findings([*storm.findings, *left])


def _hurt(world: World, options: Options, storm: Storm, max_faults: int | None) -> Report:
    """Everything that needs the stack alive."""
    expected = undisturbed(world)
    rss_before_mb = remains.rss_mb(world)
    load = Load(world)
    load.start()
    began_s = time.monotonic()
    storm.rage(duration_s=60 * options.minutes, max_faults=max_faults)
    storm.findings += _drain(load, world)
    took_s = time.monotonic() - began_s
    num_leaked, leaks = remains.kv_leaked(world)
    growth_mb = remains.rss_mb(world) - rss_before_mb
    storm.findings += [*leaks, *remains.unbounded(world, growth_mb)]
    load.stop()
    asked, readers = world.journal.everything(), world.journal.readers()
    storm.findings += judge(world.database_url, asked, readers, expected)
    by_state, num_tokens = achieved(world.database_url, [each.id for each in asked if each.door != "calm"])
    return Report(
        seed=options.seed,
        minutes=options.minutes,
        dtype=options.dtype,
        stages=options.stages,
        faults=kinds(storm.struck),
        num_faults=len(storm.struck),
        num_kills=sum(each.is_kill for each in storm.struck),
        not_run=storm.not_run,
        accepted=sum(by_state.values()),
        succeeded=by_state["succeeded"],
        failed_expected=sum(by_state[state] for state in ("cancelled", "expired", "failed")),
        kv_blocks_leaked=num_leaked,
        worst_recovery_s=max((each.recovery_s or 0.0 for each in storm.struck), default=0.0),
        rss_growth_mb=growth_mb,
        useful_tokens_per_s=num_tokens / took_s,
        streams_read=len(readers),
        streams_rejoined=sum(each.num_joins > 1 for each in readers),
        struck=storm.struck,
    )


def _drain(load: Load, world: World) -> list[Finding]:
    """I8: everything ends. Which jobs have not, the judge tells."""
    is_quiet = load.drain(DRAIN_S)
    findings = [Finding(invariant="I8", count="dead_threads", what=f"the load's {name} died") for name in load.dead()]
    if not is_quiet:
        what = f"{len(world.journal.open())} jobs have not ended {DRAIN_S:.0f} s after the last fault"
        findings.append(Finding(invariant="I8", count="stuck", what=what))
    return findings
