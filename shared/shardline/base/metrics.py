"""Every metric's name, labels and meaning, in one place. Owns no endpoint and measures nothing
itself.

Needs prometheus-client (extra `observe`): services have it, producers need not. Each service makes
its own set once, on its own registry.
"""

from __future__ import annotations

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
        self.requests = Counter(
            "shardline_http_requests",
            "Requests answered",
            ["route", "method", "status"],
            registry=registry,
        )
        self.seconds = Histogram(
            "shardline_http_request_seconds",
            "Time to the end of the answer",
            ["route"],
            buckets=SECONDS,
            registry=registry,
        )
        self.first_token_seconds = Histogram(
            "shardline_http_first_token_seconds",
            "Time from a streaming request to its first token",
            buckets=SECONDS,
            registry=registry,
        )
        self.accepted = Counter(
            "shardline_jobs_accepted", "Jobs committed by this door", ["model"], registry=registry
        )
        self.refused = Counter(
            "shardline_jobs_refused", "Requests refused", ["code"], registry=registry
        )
        self.abandoned = Counter(
            "shardline_http_disconnects",
            "Completions cancelled because the caller left",
            registry=registry,
        )
        self.in_flight = Gauge(
            "shardline_http_in_flight", "Requests admitted and not yet answered", registry=registry
        )
        self.followers = Gauge(
            "shardline_http_followers", "Event streams of jobs that are followed", registry=registry
        )
        self.connections = Gauge(
            "shardline_http_connections", "Open connections of callers", registry=registry
        )
        self.connections_closed = Counter(
            "shardline_http_connections_closed",
            "Connections closed by a limit",
            ["reason"],
            registry=registry,
        )
        self.insert_batch = Histogram(
            "shardline_insert_batch_jobs",
            "Jobs committed by one transaction",
            buckets=BATCH,
            registry=registry,
        )
        timeouts = ("head_timeout", "write_timeout", "request_timeout")
        refusals = ("limit", "request_head_too_large", "bad_request", "pipelined")
        _begin_at_0(self.connections_closed, *timeouts, *refusals)


class RelayMetrics:
    """What a relay did."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.sent = Counter(
            "shardline_relay_sent", "Celery messages sent", ["model"], registry=registry
        )
        self.resent = Counter(
            "shardline_relay_resent", "Messages sent again, the first seems lost", registry=registry
        )
        self.swept = Counter(
            "shardline_relay_swept", "Rows that a sweep moved", ["outcome"], registry=registry
        )
        self.deleted = Counter(
            "shardline_relay_deleted", "Ended jobs deleted by age", registry=registry
        )
        self.prepared = Counter(
            "shardline_relay_prepared", "Rows tokenized by the relay", registry=registry
        )
        self.refused = Counter(
            "shardline_relay_refused", "Rows failed as invalid by the relay", registry=registry
        )
        self.intake = Counter(
            "shardline_intake_entries",
            "Intake stream entries, by what became of them",
            ["outcome"],
            registry=registry,
        )
        self.table_bytes = Gauge(
            "shardline_table_bytes",
            "A table's size with its indexes and long values",
            ["table"],
            registry=registry,
        )
        self.dead_rows = Gauge(
            "shardline_dead_rows",
            "Old versions of a table's rows, not yet taken away",
            ["table"],
            registry=registry,
        )
        self.dead_letters = Gauge(
            "shardline_dead_letters", "Dead letters kept, at most 10,000", registry=registry
        )
        self.jobs = Gauge(
            "shardline_jobs", "Jobs not yet ended", ["model", "state"], registry=registry
        )
        self.oldest_queued_seconds = Gauge(
            "shardline_oldest_queued_seconds",
            "For how long the oldest job waits that may run",
            ["model"],
            registry=registry,
        )
        self.fleet_workers = Gauge(
            "shardline_fleet_workers",
            "Workers of a fleet that may serve a model",
            ["model"],
            registry=registry,
        )
        self.fleet_tokens_per_s = Gauge(
            "shardline_fleet_tokens_per_s",
            "Predicted of a model's plan, 0 without one",
            ["model"],
            registry=registry,
        )
        self.energy_rate = Gauge(
            "shardline_energy_rate",
            "Money, or grams of CO2 equivalent, for a kWh now",
            ["kind"],
            registry=registry,
        )
        self.errors = Counter(
            "shardline_relay_errors", "Turns cut short by a server", ["server"], registry=registry
        )
        _begin_at_0(self.swept, "lost", "crashed", "failed", "cancelled", "expired")
        _begin_at_0(self.intake, "accepted", "failed", "dead")
        _begin_at_0(self.errors, "postgres", "redis", "none")


class StageMetrics:
    """What any stage did: its steps and its KV."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.steps = Counter("shardline_steps", "Steps done by this stage", registry=registry)
        self.step_seconds = Histogram(
            "shardline_step_seconds",
            "Time of one step in this stage",
            buckets=STEP_SECONDS,
            registry=registry,
        )
        self.step_time_ratio = Gauge(
            "shardline_step_time_ratio",
            "Time of steps, over what the device's profile says",
            registry=registry,
        )
        self.step_time_ratio.set(1)
        self.device_bytes_per_s = Gauge(
            "shardline_device_bytes_per_second",
            "What the device streams, as it was measured: weights for one row, kv for decode rows",
            ["what"],
            registry=registry,
        )
        self.device_flops = Gauge(
            "shardline_device_operations_per_second",
            "Of a layer's products, as it was measured, by packed rows",
            ["rows"],
            registry=registry,
        )
        self.link_latency_s = Gauge(
            "shardline_link_latency_seconds",
            "To another machine, as it was measured",
            ["machine"],
            registry=registry,
        )
        self.link_bytes_per_s = Gauge(
            "shardline_link_bytes_per_second",
            "To another machine, as it was measured",
            ["machine"],
            registry=registry,
        )
        self.stage_seconds = Counter(
            "shardline_stage_seconds",
            "Time while the pipeline had a step in flight, by what the stage did",
            ["doing"],
            registry=registry,
        )
        self.energy_j = Gauge(
            "shardline_energy_joules",
            "Energy of this stage's device since its start, by what the stage did; it only grows",
            ["doing", "source"],
            registry=registry,
        )
        self.kv_blocks = Gauge(
            "shardline_kv_blocks", "KV blocks of this stage", ["state"], registry=registry
        )
        self.kv_moves = Counter(
            "shardline_kv_moves",
            "KV blocks copied out of the pool and back",
            ["direction"],
            registry=registry,
        )
        self.stage_info = Gauge(
            "shardline_stage_info",
            "1: who this stage is, to be joined with its other metrics",
            ["model", "worker", "device", "layers"],
            registry=registry,
        )
        self.exact = Gauge(
            "shardline_exact",
            "1 if outputs never depend on the batch or a restart",
            registry=registry,
        )
        _begin_at_0(self.stage_seconds, "compute", "hop", "wait")
        _begin_at_0(self.kv_moves, "out", "back")


class HeadMetrics:
    """What only a head knows: sequences, tokens, and its pipeline. Other stages do not show these
    names: a sum over stages counts each token once, and no pipeline seems to be down where there is
    none."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.prompt_tokens = Counter(
            "shardline_prompt_tokens", "Prompt tokens computed", registry=registry
        )
        self.cached_tokens = Counter(
            "shardline_cached_tokens",
            "Tokens found in the prefix cache, not computed",
            registry=registry,
        )
        self.output_tokens = Counter(
            "shardline_output_tokens", "Tokens generated", registry=registry
        )
        self.draft_tokens = Counter(
            "shardline_draft_tokens", "Tokens that prompt lookup guessed", registry=registry
        )
        self.accepted_tokens = Counter(
            "shardline_accepted_tokens", "Guessed tokens that came true", registry=registry
        )
        self.blamed = Counter(
            "shardline_jobs_blamed",
            "Jobs given back: the pipeline broke under them alone",
            ["outcome"],
            registry=registry,
        )
        self.job_energy_j = Counter(
            "shardline_job_energy_joules",
            "Energy of attempts that left this head",
            ["tenant"],
            registry=registry,
        )
        self.job_s = Histogram(
            "shardline_job_seconds",
            "From a job's being due to its end, earlier attempts included",
            ["model", "outcome"],
            buckets=SECONDS,
            registry=registry,
        )
        self.first_token_s = Histogram(
            "shardline_job_first_token_seconds",
            "From a job's being due to its first token",
            ["model"],
            buckets=SECONDS,
            registry=registry,
        )
        self.token_s = Histogram(
            "shardline_job_token_seconds",
            "Between two tokens of a job, its average",
            ["model"],
            buckets=STEP_SECONDS,
            registry=registry,
        )
        self.seats = Gauge("shardline_seats", "Places in the batch", registry=registry)
        self.running = Gauge(
            "shardline_sequences_running", "Sequences in the batch", registry=registry
        )
        self.waiting = Gauge(
            "shardline_sequences_waiting", "Sequences claimed and waiting", registry=registry
        )
        self.epoch = Gauge(
            "shardline_pipeline_epoch", "Epoch of this head's pipeline", registry=registry
        )
        self.ready = Gauge(
            "shardline_pipeline_ready", "1 while the pipeline can generate", registry=registry
        )
        _begin_at_0(self.blamed, "lost", "crashed", "failed")


def _begin_at_0(counter: Counter, *values: str) -> None:
    """A counter that appears with its first event has no rate at it: an alarm would miss that
    one."""
    for value in values:
        counter.labels(value)
