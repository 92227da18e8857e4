"""The object `timings` of llama-server."""

from __future__ import annotations

from typing import Any

from llamaq.common.protocol.job_outcome import JobStats


def timings_object(stats: JobStats, *, n_first: int = 1) -> dict[str, Any]:
    """Return the object `timings` of llama-server for a job that has finished, or that runs.

    Args:
        stats: The stats of the job.
        n_first: Number of the generated tokens that were there when the time of the others began.
    """
    computed = max(stats.prompt_tokens - stats.prefix_cache_tokens, 0)
    prompt_ms = stats.ttft_ms if stats.ttft_ms is not None else stats.duration_ms
    generated, generated_ms = stats.generated_tokens, max(stats.duration_ms - prompt_ms, 0.0)
    # The first token comes from the prompt, so it needs no step of its own.
    n_steps = max(generated - n_first, 0)
    drafts = {"draft_n": stats.drafted_tokens, "draft_n_accepted": stats.accepted_tokens}
    return {
        "cache_n": stats.prefix_cache_tokens,
        "prompt_n": computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / computed if computed else 0.0,
        "prompt_per_second": stats.prompt_eval_rate or 0.0,
        "predicted_n": generated,
        "predicted_ms": generated_ms,
        "predicted_per_token_ms": generated_ms / n_steps if n_steps else 0.0,
        "predicted_per_second": 1000 * n_steps / generated_ms if n_steps and generated_ms else 0.0,
        "queue_ms": stats.queue_ms,
        **(drafts if stats.drafted_tokens else {}),
    }
