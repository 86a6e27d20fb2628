"""What each dashboard shows: a line a panel. Knows no JSON."""

from __future__ import annotations

from docker.monitoring.panels import Dashboard, Query, panel

INFO = 'shardline_stage_info{model=~"$model"}'


def rate(counter: str) -> str:
    """A counter's rate, each series for itself."""
    return f"rate({counter}[$__rate_interval])"


def total(counter: str, *by: str) -> Query:
    """A counter's rate over all processes, by labels."""
    if not by:
        return "all", f"sum ({rate(counter)})"
    return _legend(*by), f"sum by ({', '.join(by)}) ({rate(counter)})"


def largest(gauge: str, *by: str) -> Query:
    """A gauge that every relay shows alike."""
    return _legend(*by), f"max by ({', '.join(by)}) ({gauge})"


def quantile(share: float, histogram: str, *by: str) -> Query:
    """Over all processes, by labels."""
    buckets = f"sum by ({', '.join(('le', *by))}) ({rate(f'{histogram}_bucket')})"
    return f"p{share * 100:.0f} {_legend(*by)}".strip(), f"histogram_quantile({share}, {buckets})"


def quantiles(histogram: str, *by: str) -> tuple[Query, Query]:
    """The median, and what one of 20 exceeds."""
    return quantile(0.5, histogram, *by), quantile(0.95, histogram, *by)


def of_stage(expression: str) -> str:
    """Its series with the stage's model, worker and device, of the chosen model only."""
    return f"({expression}) * on (instance) group_left (model, worker, device) {INFO}"


def stage(expression: str, *labels: str) -> Query:
    """A line for each stage, or several by labels."""
    return _legend("worker", *labels), of_stage(expression)


def head(expression: str, what: str) -> Query:
    """A line for each head, one of several."""
    return f"{what} {{{{worker}}}}", of_stage(expression)


def _legend(*labels: str) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in labels)


# Shares and averages.
COMPUTE = rate('shardline_stage_seconds_total{doing="compute"}')
HOP = rate('shardline_stage_seconds_total{doing="hop"}')
BUBBLE = (
    f"1 - {COMPUTE} / ignoring (doing) sum without (doing) "
    f"({rate('shardline_stage_seconds_total')})"
)
HOP_OF_STEP = f"{HOP} / ignoring (doing) {rate('shardline_steps_total')}"
STEP = f"{rate('shardline_step_seconds_sum')} / {rate('shardline_step_seconds_count')}"
KV = 'shardline_kv_blocks{state="used"} / ignoring (state) shardline_kv_blocks{state="all"}'
SEATS = "shardline_sequences_running / shardline_seats"
CACHED = rate("shardline_cached_tokens_total")
PROMPT = rate("shardline_prompt_tokens_total")
PREFIX_HITS = f"{CACHED} / ({CACHED} + {PROMPT})"
OUTPUT = rate("shardline_output_tokens_total")
GUESSED = f"{rate('shardline_accepted_tokens_total')} / {rate('shardline_draft_tokens_total')}"
WATTS = rate("shardline_energy_joules")
TOKEN_J = f"sum by (model) ({of_stage(WATTS)}) / sum by (model) ({of_stage(OUTPUT)})"

JOBS = panel("Jobs not yet ended", "short", largest("shardline_jobs", "model", "state"))

INSTALLATION = Dashboard(
    name="installation",
    title="installation",
    panels=(
        panel("Jobs accepted by HTTP", "reqps", total("shardline_jobs_accepted_total", "model")),
        panel("Jobs ended by heads", "reqps", total("shardline_job_seconds_count", "outcome")),
        panel("Connections of callers", "short", ("open", "sum (shardline_http_connections)")),
        panel(
            "Connections closed by a limit",
            "cps",
            total("shardline_http_connections_closed_total", "reason"),
        ),
        JOBS,
        panel("Output tokens", "cps", total("shardline_output_tokens_total")),
        panel("Prompt tokens computed", "cps", total("shardline_prompt_tokens_total")),
        panel(
            "From due to first token", "s", *quantiles("shardline_job_first_token_seconds", "model")
        ),
        panel("Between two tokens", "s", *quantiles("shardline_job_token_seconds", "model")),
        panel("From due to end", "s", *quantiles("shardline_job_seconds", "model")),
        panel("HTTP answers", "reqps", total("shardline_http_requests_total", "status")),
        panel("HTTP duration", "s", quantile(0.95, "shardline_http_request_seconds", "route")),
        panel(
            "HTTP: to a stream's first token", "s", *quantiles("shardline_http_first_token_seconds")
        ),
        panel("HTTP requests in flight", "short", ("all", "sum (shardline_http_in_flight)")),
        panel("HTTP streams followed", "short", ("all", "sum (shardline_http_followers)")),
        panel("HTTP callers who left", "reqps", total("shardline_http_disconnects_total")),
        panel("HTTP refusals", "reqps", total("shardline_jobs_refused_total", "code")),
        panel("Errors of relays", "reqps", total("shardline_relay_errors_total", "server")),
    ),
)

PIPELINE = Dashboard(
    name="pipeline",
    title="pipeline",
    has_model=True,
    panels=(
        panel("Bubble share", "percentunit", stage(BUBBLE)),
        panel("Hop time of a step", "s", stage(HOP_OF_STEP)),
        panel("Time of a step", "s", stage(STEP)),
        panel("KV in use", "percentunit", stage(KV)),
        panel("States of recurrent layers", "short", stage("shardline_recurrent_states", "state")),
        panel("Seats in use", "percentunit", stage(SEATS)),
        panel(
            "Sequences that wait for a seat or KV", "short", stage("shardline_sequences_waiting")
        ),
        panel("Prefix hits", "percentunit", stage(PREFIX_HITS)),
        panel("Guessed tokens that came true", "percentunit", stage(GUESSED)),
        panel("Tokens", "cps", head(OUTPUT, "output"), head(PROMPT, "prompt")),
        panel("KV blocks moved", "cps", stage(rate("shardline_kv_moves_total"), "direction")),
        panel("Ready", "short", stage("shardline_pipeline_ready")),
        panel("Epoch", "short", stage("shardline_pipeline_epoch")),
    ),
)

QUEUES = Dashboard(
    name="queues",
    title="queues",
    panels=(
        JOBS,
        panel("Wait of the oldest job", "s", largest("shardline_oldest_queued_seconds", "model")),
        panel("Messages to heads", "reqps", total("shardline_relay_sent_total", "model")),
        panel("Messages sent again", "reqps", total("shardline_relay_resent_total")),
        panel(
            "Intake of Celery and Redis",
            "reqps",
            total("shardline_intake_entries_total", "outcome"),
        ),
        panel("Webhooks", "reqps", total("shardline_webhook_attempts_total", "outcome")),
        panel("Schedules due", "reqps", total("shardline_schedules_due_total", "outcome")),
        panel("Rows tokenized by relays", "reqps", total("shardline_relay_prepared_total")),
        panel("Rows refused by relays", "reqps", total("shardline_relay_refused_total")),
        panel("Rows swept", "reqps", total("shardline_relay_swept_total", "outcome")),
        panel(
            "Jobs that broke a pipeline", "reqps", total("shardline_jobs_blamed_total", "outcome")
        ),
        panel("Jobs of one insert", "short", *quantiles("shardline_insert_batch_jobs")),
        panel("Dead letters", "short", ("kept", "max (shardline_dead_letters)")),
        panel("Tables", "bytes", largest("shardline_table_bytes", "table")),
        panel("Dead rows", "short", largest("shardline_dead_rows", "table")),
        panel("Rows deleted by retention", "reqps", total("shardline_relay_deleted_total")),
    ),
)

FLEET = Dashboard(
    name="fleet",
    title="fleets and devices",
    has_model=True,
    panels=(
        panel("Workers of a fleet", "short", largest("shardline_fleet_workers", "model")),
        panel(
            "Tokens/s predicted of its plan",
            "cps",
            largest("shardline_fleet_tokens_per_s", "model"),
        ),
        panel("Stages", "short", ("{{model}}", f"count by (model) ({INFO})")),
        panel("Device utilization", "percentunit", stage(COMPUTE, "device")),
        panel("Power", "watt", stage(WATTS, "doing")),
        panel("Energy of an output token", "joule", ("{{model}}", TOKEN_J)),
        panel("Energy by tenant", "watt", total("shardline_job_energy_joules_total", "tenant")),
        panel("What a kWh costs", "short", largest("shardline_energy_rate", "kind")),
        panel("Step time over the profile's", "percentunit", stage("shardline_step_time_ratio")),
        panel("Memory bandwidth", "Bps", stage("shardline_device_bytes_per_second", "what")),
        panel("Operations", "ops", stage("shardline_device_operations_per_second", "rows")),
        panel("Latency of links", "s", stage("shardline_link_latency_seconds", "machine")),
        panel("Bandwidth of links", "Bps", stage("shardline_link_bytes_per_second", "machine")),
    ),
)

DASHBOARDS = (INSTALLATION, PIPELINE, QUEUES, FLEET)
