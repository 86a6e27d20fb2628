"""Jobs as the native API shows them, whole and in lists. Knows no transport."""

from __future__ import annotations

from services.gateway.bodies import JobDocument, JobHead, JobListed, JobResult
from services.gateway.openai.responses import usage_of
from shardline.contract.job import Job, JobSummary, Result


def summary_document(job: JobSummary) -> JobListed:
    """A job as lists show it."""
    return {
        **_job_head(job),
        "prompt_start": job.prompt_start,
        "finish_reason": job.finish_reason,
        "usage": None if job.usage is None else usage_of(job.usage),
    }


def job_document(job: Job) -> JobDocument:
    """A job as the native API shows it."""
    return {
        **_job_head(job),
        "prompt": job.prompt,
        "prompt_token_ids": job.prompt_token_ids,
        "params": job.params,
        "seed": job.seed,
        "metadata": job.metadata,
        "result": None if job.result is None else _job_result(job.result),
    }


def _job_head(job: Job | JobSummary) -> JobHead:
    return {
        "id": job.id,
        "object": "job",
        "state": job.state,
        "model": job.model,
        "tenant": job.tenant,
        "priority": job.priority,
        "created_at": job.created_at,
        "finished_at": job.finished_at,
        "cancel_requested": job.cancel_requested,
        "crashes": job.crashes,
        "replay_of": job.replay_of,
        "error": job.error,
    }


def _job_result(result: Result) -> JobResult:
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "usage": usage_of(result.usage),
        "logprobs": result.logprobs,
        "exact": result.exact,
        "timings": result.timings,
        "provenance": result.provenance,
    }
