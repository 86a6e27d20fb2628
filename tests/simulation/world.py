"""One seed: a site, its jobs, its faults, its readers, and the invariants at the end."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, cast
from uuid import UUID

import msgspec

from shardline.contract.job import JobState, SamplingParams
from shardline.store.jobs import request_cancel
from shardline_scheduler.kv_blocks import BLOCK_TOKENS
from shardline_scheduler.scheduler import Scheduler
from tests.simulation.broken import require
from tests.simulation.connection import Connection
from tests.simulation.faults import FAULTS
from tests.simulation.loom import Loom
from tests.simulation.machines import (
    TIMES,
    HeadMachine,
    LaterMachine,
    RelayMachine,
    Site,
    StageMachine,
)
from tests.simulation.reader import Reader
from tests.simulation.rows import Job, Tables, crash_limits
from tests.simulation.servers import Postgres, Redis
from tests.simulation.toy import MAX_LEN, NUM_LAYERS, NUM_TOKENS, POISON, undisturbed
from tests.simulation.wires import Network

STORM_S = 10.0
"""Faults strike for so long."""

CALM_S = 120.0
"""Then everything must end within so much."""

LONG_AFTER_S = 8.0
"""Whoever was paused or killed last is back, has learned that its claims are lost, and has cleaned
up."""


@dataclass(eq=False, slots=True)
class World:
    """Everything of one seed."""

    seed: int
    rng: random.Random
    loom: Loom
    site: Site
    tables: Tables
    machines: list[StageMachine | RelayMachine] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    poisoned: set[UUID] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    """What struck, with its time: a failing seed prints it."""
    disturbed_s: float = 0.0
    """When the last of them is over."""

    @classmethod
    def make(cls, seed: int) -> World:
        """Of this seed."""
        loom = Loom(seed)
        rng = loom.rng
        tables = Tables(lambda: loom.now_s, lease_s=TIMES.lease_s)
        site = Site(
            loom=loom,
            network=Network(loom, loss=rng.choice([0.0, 0.0, 0.002, 0.02])),
            postgres=Postgres(loom, tables, lost_answers=rng.choice([0.0, 0.02, 0.1])),
            redis=Redis(loom, repeats=rng.choice([0.0, 0.3]), losses=rng.choice([0.0, 0.2])),
            exact=rng.random() < 0.7,
            num_blocks=rng.choice([3, 4, 6, 16]),
            num_lanes=rng.choice([None, None, 1, 2]),
            step_s=rng.choice([0.01, 0.05, 0.1]),
            num_slots=rng.choice([0, 1, 4]),
        )
        return cls(seed, rng, loom, site, tables)

    def run(self) -> None:
        """Storm, calm, check. Raises Broken, or whatever the product raised."""
        self._start_machines()
        self._submit()
        for _ in range(self.rng.randint(1, 8)):
            self.loom.at(self.rng.uniform(0.2, STORM_S), self._strike)
        self.loom.after(0.1, self._read)
        self.loom.run_until(STORM_S)
        self._calm()
        self.loom.run_until(STORM_S + CALM_S, self._is_over)
        self._check_ends()
        self.loom.run_until(max(self.loom.now_s, self.disturbed_s) + LONG_AFTER_S)
        self._check_rest()

    def stop(self) -> None:
        """Ends what still runs."""
        for machine in self.machines:
            machine.may_restart = False
            machine.process.kill()
        self.loom.run_until(self.loom.now_s)

    def tally(self) -> Counter[str]:
        """What came about, for whoever asks whether the storms are storms."""
        network = self.site.network
        jobs = self.tables.jobs.values()
        attempts = self.tables.attempts.values()
        states = Counter({f"{state} jobs": 0 for state in JobState if state.terminal})
        states.update(f"{job.state} jobs" for job in jobs)
        outcomes = Counter(
            {f"{outcome} attempts": 0 for outcome in ("released", "lost", "crashed")}
        )
        outcomes.update(
            f"{one.outcome} attempts" for one in attempts if f"{one.outcome} attempts" in outcomes
        )
        tally = Counter(
            {
                "lost frames": network.num_lost,
                "repeated frames": network.num_repeated,
                "frames of older epochs": network.num_replayed,
                "lost answers to COMMIT": self.site.postgres.num_lost_answers,
                "resumed attempts": sum(one.num_resumed > 0 for one in attempts),
                "new epochs": sum(row.epoch - 1 for row in self.tables.pipelines.values()),
            }
        )
        for part in (states, outcomes):
            tally.update(part)
        return tally

    # The cast
    # ----------------------------------------------------------------------------------------------

    def _start_machines(self) -> None:
        rng = self.rng
        site = self.site
        cuts = rng.choice([(), (1,), (2,), (1, 2)])
        bounds = [0, *cuts, NUM_LAYERS]
        shards = [range(first, last) for first, last in pairwise(bounds)]
        deadly = rng.randrange(len(shards))
        num_heads, num_chains = rng.choice([(1, 1), (1, 1), (1, 2), (2, 1), (2, 2)])
        for place, shard in enumerate(shards):
            for copy in range(num_heads if place == 0 else num_chains):
                kind = HeadMachine if place == 0 else LaterMachine
                restart_s = rng.uniform(0.3, 3.0)
                name = f"stage-{place}-{copy}"
                self.machines.append(
                    kind(site, name, shard, restart_s=restart_s, is_deadly=place == deadly)
                )
        for number in range(rng.choice([1, 2])):
            self.machines.append(RelayMachine(site, f"relay-{number}", rng.uniform(0.3, 3.0)))

    def _submit(self) -> None:
        for number in range(self.rng.randint(3, 10)):
            is_late = self.rng.random() < 0.5
            at_s = self.rng.uniform(0.0, STORM_S / 2) if is_late else 0.0
            self.loom.at(at_s, partial(self._accept, number))

    def _accept(self, number: int) -> None:
        rng = self.rng
        now_s = self.loom.now_s
        prompt = [rng.randrange(NUM_TOKENS) for _ in range(rng.choice([1, 3, 8, 40, 70]))]
        if rng.random() < 0.5:  # It begins as others do: what they have computed of it is found.
            prompt[:BLOCK_TOKENS] = [
                place % NUM_TOKENS for place in range(min(len(prompt), BLOCK_TOKENS))
            ]
        job_id = UUID(int=rng.getrandbits(128))
        if rng.random() < 0.04:
            prompt[rng.randrange(len(prompt))] = POISON
            self.poisoned.add(job_id)
        max_tokens = min(rng.choice([1, 5, 20, 60, 100]), MAX_LEN - len(prompt))
        job = Job(
            id=job_id,
            number=number,
            prompt_ids=tuple(prompt),
            params=msgspec.to_builtins(SamplingParams(max_tokens=max_tokens)),
            max_tokens=max_tokens,
            seed=rng.getrandbits(32),
            created_s=now_s,
            not_before_s=now_s + rng.choice([0.0, 0.0, 0.0, 3.0]),
            priority=rng.choice([3, 5, 5]),
            deadline_s=now_s + rng.uniform(0.5, 15.0) if rng.random() < 0.1 else None,
            **crash_limits(number, is_poisoned=job_id in self.poisoned),
        )
        self.tables.insert(job)
        self.readers.append(Reader(job))
        if rng.random() < 0.1:
            self.loom.after(rng.uniform(0.0, 10.0), partial(self._cancel, job_id))

    def _cancel(self, job_id: UUID) -> None:
        request_cancel(cast(Any, Connection(self.tables)), [job_id])

    # Faults
    # ----------------------------------------------------------------------------------------------

    def _strike(self) -> None:
        fault = self.rng.choice(FAULTS)
        self.faults.append(f"{self.loom.now_s:6.2f} s {fault(self)}")

    def victim(self) -> StageMachine | RelayMachine:
        """A process, stages more often."""
        return self.rng.choice(self.machines)

    def lasts(self, duration_s: float) -> None:
        """A fault goes on for so long."""
        self.disturbed_s = max(self.disturbed_s, self.loom.now_s + duration_s)

    def _calm(self) -> None:
        self.site.network.loss = self.site.postgres.lost_answers = 0.0
        self.site.redis.repeats = self.site.redis.losses = 0.0

    # Readers
    # ----------------------------------------------------------------------------------------------

    def _read(self) -> None:
        for reader in self.readers:
            if reader.state is None:
                reader.follow(self.site.redis, self.tables, self.rng)
        if not all(reader.state for reader in self.readers) or self.loom.now_s < STORM_S:
            self.loom.after(0.5, self._read)

    # Invariants
    # ----------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        return all(job.state.terminal for job in self.tables.jobs.values()) and all(
            reader.state for reader in self.readers
        )

    def _check_ends(self) -> None:
        open_jobs = [
            f"{job.id} {job.state}" for job in self.tables.jobs.values() if not job.state.terminal
        ]
        require(not open_jobs, f"stuck: {open_jobs}")
        require(not self.tables.stale_writes, f"stale writes: {self.tables.stale_writes}")
        require(
            not self.tables.wrong_leases, f"leases by another clock: {self.tables.wrong_leases[:1]}"
        )
        require(
            not self.site.unfenced,
            f"{len(self.site.unfenced)} steps without a lease: {self.site.unfenced[:1]}",
        )
        for reader in self.readers:
            self._check_job(reader)

    def _check_job(self, reader: Reader) -> None:
        job = reader.job
        result = self.tables.results.get(reader.job.id)
        if job.id in self.poisoned and job.state is JobState.FAILED:
            return
        require(job.state is not JobState.FAILED, f"{job.id} failed: {job.error}")
        tokens = result.token_ids if result else ()
        require(
            (job.state is JobState.SUCCEEDED) <= (result is not None), f"{job.id} has no result"
        )
        told = reader.tokens
        if job.state is not JobState.SUCCEEDED and self.site.exact:
            # Streams run ahead of checkpoints: what a relay ends has the tokens that were saved.
            told = told[: len(tokens)]
        require(
            list(tokens) == told,
            f"the stream of {job.id} said {reader.tokens}, the result is {tokens}",
        )
        saved = self.tables.saved.get(job.id, ())
        require(tokens[: len(saved)] == saved, f"{job.id} lost its checkpoint {saved}: {tokens}")
        if self.site.exact:
            expected = undisturbed(job.prompt_ids, job.seed, job.max_tokens)
            is_whole = job.state is JobState.SUCCEEDED
            wanted = expected if is_whole else expected[: len(tokens)]
            require(tokens == wanted, f"{job.id} {job.state}: {tokens}, expected {wanted}")
        for (job_id, fence), attempt in self.tables.attempts.items():
            if job_id == job.id and attempt.outcome == "crashed":
                is_crash = len(attempt.tokens) == attempt.num_resumed
                require(
                    is_crash, f"{job_id} at fence {fence} had new tokens and was counted as a crash"
                )

    def _check_rest(self) -> None:
        for machine in self.machines:
            if not machine.process.is_alive:
                continue
            if isinstance(machine, HeadMachine) and machine.head is not None:
                scheduler: Scheduler = machine.head._scheduler
                is_wired = machine.head._engine._wiring is not None
                require(
                    scheduler.num_running + scheduler.num_waiting == 0,
                    f"{machine.name} still has sequences",
                )
                # Blocks of an epoch that is over are given back when the next one begins.
                require(scheduler.idle or not is_wired, f"{machine.name} is not idle")
                require(
                    scheduler.blocks_used == 0 or not is_wired, f"{machine.name} holds KV blocks"
                )
            if isinstance(machine, StageMachine) and machine.toy is not None:
                require(
                    machine.toy.blocks_used == 0,
                    f"{machine.name} uses {machine.toy.blocks_used} KV blocks",
                )
        require(not self.tables.stale_writes, f"stale writes: {self.tables.stale_writes}")
