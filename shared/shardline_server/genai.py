"""Names of span attributes: OpenTelemetry's conventions for generative AI, as of semantic
conventions 0.66, and ours.

Those conventions still change: a new name is taken over here and nowhere else.
"""

from __future__ import annotations

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_SEED = "gen_ai.request.seed"
RESPONSE_ID = "gen_ai.response.id"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"

TEXT_COMPLETION = "text_completion"
"""The operation of every job: chats are prompts by the time that a head sees them."""
SHARDLINE = "shardline"
"""The provider."""

JOB_ID = "shardline.job.id"
JOB_STATE = "shardline.job.state"
TENANT = "shardline.job.tenant"
FENCE = "shardline.attempt.fence"
OUTCOME = "shardline.attempt.outcome"
NUM_RESUMED = "shardline.attempt.resumed_tokens"
NUM_SENDS = "shardline.publish.sends"
WORKER = "shardline.worker"
PIPELINE = "shardline.pipeline"
EPOCH = "shardline.pipeline.epoch"
LAYERS = "shardline.stage.layers"
DEVICE = "shardline.stage.device"
STEPS = "shardline.stage.steps"
COMPUTE_S = "shardline.stage.compute_seconds"
HOP_S = "shardline.stage.hop_seconds"
