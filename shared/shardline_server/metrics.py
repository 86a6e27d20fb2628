"""Every metric's name, labels and meaning, in one place. Owns no endpoint and measures nothing
itself.

Needs prometheus-client (extra `observe`): services have it, producers need not. Each service makes
its own set once, on its own registry.
"""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12)
BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

ALL_INTERFACES = "0.0.0.0"  # noqa: S104 (scraped from outside)


def serve(port: int, registry: CollectorRegistry, *, host: str = ALL_INTERFACES) -> None:
    """Answer GET /metrics on `port`, on a separate thread, until the process ends."""
    start_http_server(port, addr=host, registry=registry)


class GatewayMetrics:
    """What the HTTP door sees."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.requests = counter(
            "shardline_http_requests", "Requests answered", ["route", "method", "status"]
        )
        self.seconds = histogram(
            "shardline_http_request_seconds",
            "Time to the end of the answer",
            ["route"],
            buckets=SECONDS,
        )
        self.first_token_seconds = histogram(
            "shardline_http_first_token_seconds",
            "Time from a streaming request to its first token",
            buckets=SECONDS,
        )
        self.accepted = counter("shardline_jobs_accepted", "Jobs committed by this door", ["model"])
        self.refused = counter("shardline_jobs_refused", "Requests refused", ["code"])
        self.abandoned = counter(
            "shardline_http_disconnects", "Completions cancelled because the caller left"
        )
        self.in_flight = gauge("shardline_http_in_flight", "Requests admitted and not yet answered")
        self.followers = gauge(
            "shardline_http_followers", "Event streams of jobs that are followed"
        )
        self.connections = gauge("shardline_http_connections", "Open connections of callers")
        self.connections_closed = counter(
            "shardline_http_connections_closed", "Connections closed by a limit", ["reason"]
        )
        self.insert_batch = histogram(
            "shardline_insert_batch_jobs", "Jobs committed by one transaction", buckets=BATCH
        )
        timeouts = ("head_timeout", "write_timeout", "request_timeout")
        refusals = ("limit", "request_head_too_large", "bad_request", "pipelined")
        _begin_at_0(self.connections_closed, *timeouts, *refusals)


class RelayMetrics:
    """What a relay did."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        self.sent = counter("shardline_relay_sent", "Celery messages sent", ["model"])
        self.resent = counter("shardline_relay_resent", "Messages sent again, the first seems lost")
        self.swept = counter("shardline_relay_swept", "Rows that a sweep moved", ["outcome"])
        self.deleted = counter("shardline_relay_deleted", "Ended jobs deleted by age")
        self.prepared = counter("shardline_relay_prepared", "Rows tokenized by the relay")
        self.refused = counter("shardline_relay_refused", "Rows refused when they were prepared")
        self.intake = counter(
            "shardline_intake_entries",
            "Requests by Redis and Celery, by what became of them",
            ["outcome"],
        )
        self.table_bytes = gauge(
            "shardline_table_bytes", "A table's size with its indexes and long values", ["table"]
        )
        self.dead_rows = gauge(
            "shardline_dead_rows", "Old versions of a table's rows, not yet taken away", ["table"]
        )
        self.dead_letters = gauge("shardline_dead_letters", "Dead letters kept, at most 10,000")
        self.jobs = gauge("shardline_jobs", "Jobs not yet ended", ["model", "state"])
        self.oldest_queued_seconds = gauge(
            "shardline_oldest_queued_seconds",
            "For how long the oldest job waits that may run",
            ["model"],
        )
        self.fleet_workers = gauge(
            "shardline_fleet_workers", "Workers of a fleet that may serve a model", ["model"]
        )
        self.fleet_tokens_per_s = gauge(
            "shardline_fleet_tokens_per_s", "Predicted of a model's plan, 0 without one", ["model"]
        )
        self.energy_rate = gauge(
            "shardline_energy_rate", "Money, or grams of CO2 equivalent, for a kWh now", ["kind"]
        )
        self.webhooks = counter(
            "shardline_webhook_attempts",
            "Attempts at webhooks; `pending` ones failed and are tried again",
            ["outcome"],
        )
        self.schedules = counter(
            "shardline_schedules_due",
            "Schedules that were due; `refused` and `missed` ones have no job, `invalid` and "
            "`held_up` ones wait",
            ["outcome"],
        )
        self.errors = counter("shardline_relay_errors", "Turns cut short by a server", ["server"])
        _begin_at_0(self.swept, "lost", "crashed", "failed", "cancelled", "expired")
        _begin_at_0(self.intake, "accepted", "failed", "dead")
        _begin_at_0(self.webhooks, "delivered", "pending", "dead")
        _begin_at_0(self.schedules, "fired", "missed", "refused", "invalid", "held_up")
        _begin_at_0(self.errors, "postgres", "redis", "none")


class StageMetrics:
    """What any stage did: its steps and its KV."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.steps = counter("shardline_steps", "Steps done by this stage")
        self.step_seconds = histogram(
            "shardline_step_seconds", "Time of one step in this stage", buckets=STEP_SECONDS
        )
        self.step_time_ratio = gauge(
            "shardline_step_time_ratio",
            "Time of steps, over the prediction of the device's profile",
        )
        self.step_time_ratio.set(1)
        self.device_bytes_per_s = gauge(
            "shardline_device_bytes_per_second",
            "What the device streams, as it was measured: weights for one row, kv for decode rows",
            ["what"],
        )
        self.device_flops = gauge(
            "shardline_device_operations_per_second",
            "Of a layer's products, as it was measured, by packed rows",
            ["rows"],
        )
        self.link_latency_s = gauge(
            "shardline_link_latency_seconds", "To another machine, as it was measured", ["machine"]
        )
        self.link_bytes_per_s = gauge(
            "shardline_link_bytes_per_second", "To another machine, as it was measured", ["machine"]
        )
        self.stage_seconds = counter(
            "shardline_stage_seconds",
            "Time while the pipeline had a step in flight, by what the stage did",
            ["doing"],
        )
        self.energy_j = gauge(
            "shardline_energy_joules",
            "Energy of this stage's device since its start, by what the stage did; it only grows",
            ["doing", "source"],
        )
        self.kv_blocks = gauge("shardline_kv_blocks", "KV blocks of this stage", ["state"])
        self.recurrent_states = gauge(
            "shardline_recurrent_states",
            "slots of recurrent states on this stage; a head alone counts snapshots",
            ["state"],
        )
        self.kv_moves = counter(
            "shardline_kv_moves", "KV blocks copied out of the pool and back", ["direction"]
        )
        self.stage_info = gauge(
            "shardline_stage_info",
            "1: who this stage is, to be joined with its other metrics",
            ["model", "worker", "device", "layers"],
        )
        self.exact = gauge("shardline_exact", "1 if outputs never depend on the batch or a restart")
        _begin_at_0(self.stage_seconds, "compute", "hop", "wait")
        _begin_at_0(self.kv_moves, "out", "back")


class HeadMetrics:
    """What only a head knows: sequences, tokens, and its pipeline. Other stages do not show these
    names: a sum over stages counts each token once, and no pipeline seems to be down where there is
    none."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.prompt_tokens = counter("shardline_prompt_tokens", "Prompt tokens computed")
        self.cached_tokens = counter(
            "shardline_cached_tokens", "Tokens found in the prefix cache, not computed"
        )
        self.output_tokens = counter("shardline_output_tokens", "Tokens generated")
        self.draft_tokens = counter("shardline_draft_tokens", "Tokens that prompt lookup guessed")
        self.accepted_tokens = counter("shardline_accepted_tokens", "Guessed tokens that came true")
        self.blamed = counter(
            "shardline_jobs_blamed",
            "Jobs given back: the pipeline broke under them alone",
            ["outcome"],
        )
        self.job_energy_j = counter(
            "shardline_job_energy_joules", "Energy of attempts that left this head", ["tenant"]
        )
        self.job_s = histogram(
            "shardline_job_seconds",
            "From a job's being due to its end, earlier attempts included",
            ["model", "outcome"],
            buckets=SECONDS,
        )
        self.first_token_s = histogram(
            "shardline_job_first_token_seconds",
            "From a job's being due to its first token",
            ["model"],
            buckets=SECONDS,
        )
        self.token_s = histogram(
            "shardline_job_token_seconds",
            "Between two tokens of a job, its average",
            ["model"],
            buckets=STEP_SECONDS,
        )
        self.seats = gauge("shardline_seats", "Places in the batch")
        self.running = gauge("shardline_sequences_running", "Sequences in the batch")
        self.waiting = gauge("shardline_sequences_waiting", "Sequences claimed and waiting")
        self.epoch = gauge("shardline_pipeline_epoch", "Epoch of this head's pipeline")
        self.ready = gauge("shardline_pipeline_ready", "1 while the pipeline can generate")
        _begin_at_0(self.blamed, "lost", "crashed", "failed")


def _begin_at_0(counter: Counter, *values: str) -> None:
    """A counter that appears with its first event has no rate at it: an alarm would miss that
    one."""
    for value in values:
        counter.labels(value)
