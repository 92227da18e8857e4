"""Computes the stats of a finished job, and the progress of a prompt."""

from __future__ import annotations

from typing import Any, Literal

from llamaq.common.protocol.job_events import PromptProgress
from llamaq.common.protocol.job_outcome import JobStats
from llamaq.common.protocol.job_request import JobRequest
from llamaq.worker.core.job import Job
from llamaq.worker.core.slot import Run, Slot


def measure(job: Job, slot: Slot | None, now_s: float, worker: str | None) -> JobStats:
    """Return the stats of a job that ends now.

    Times are measured from the first slot of this attempt. Slot, prefix cache and rates describe only the last run,
    which began with the last admission:

    - `prompt_eval_rate` counts the prompt and resumed tokens that did not come from the prefix cache. The time for this
      rate ends with the first token of the run.
    - `generation_rate` counts the tokens that the run generated after its first one.

    Args:
        job: The job.
        slot: The job's slot. None for a job that ends without one. If it was preempted, its last run counts.
        now_s: The time on the scheduler's clock.
        worker: The id of this worker.
    """
    measured: dict[str, Any] = {
        "prompt_tokens": len(job.prompt),
        "generated_tokens": len(job.generated_before),
        "duration_ms": _ms_since(job.times.first_slot_s, now_s),
        "queue_ms": round(job.times.waited_ms(now_s), 3),
        "preempted_ms": job.times.preempted_ms(now_s),
        "worker": worker,
        "mode": mode_of(job.request),
        "seed": job.request.seed,
        "stop_string": job.detokenizer.stop_string,
        "stop_token": job.end_token if job.end_token in job.stop_tokens else None,
    }
    if job.drafting is not None:
        measured |= {"drafted_tokens": job.drafting.n_drafted, "accepted_tokens": job.drafting.n_accepted}
    measured |= job.preempted_run if slot is None else measure_run(slot, now_s)
    return JobStats(**measured)


def measure_run(slot: Slot, now_s: float) -> dict[str, Any]:
    """Return the fields of `JobStats` that describe a run which ends now.

    Args:
        slot: The slot of the run.
        now_s: The time on the scheduler's clock.
    """
    run = slot.active
    job = run.job
    measured: dict[str, Any] = {
        "generated_tokens": run.n_generated,
        "prefix_cache_tokens": min(run.cached_tokens, run.n_prompt),
        "prefix_cache_ratio": round(run.cached_tokens / (run.n_prompt + len(job.generated_before)), 4),
        "prefix_cache_tier": run.tier if run.cached_tokens else None,
        "prefix_cache_seq_id": run.admission.seq_id if run.cached_tokens else None,
        "evicted_tokens": run.admission.evicted_tokens,
        "seq_id": run.seq_id,
        "slot": slot.index,
    }
    if (first_token_s := job.first_token_s or run.prefilled_s) is not None:
        measured["ttft_ms"] = _ms(first_token_s - (job.times.first_slot_s or run.admitted_s))
    if run.prefilled_s is not None:
        n_evaluated = run.n_prompt + len(job.generated_before) - run.cached_tokens
        n_after_first = run.n_generated - len(job.generated_before) - 1
        measured |= {
            "prompt_eval_rate": _rate(n_evaluated, run.prefilled_s - run.admitted_s),
            "generation_rate": _rate(n_after_first, now_s - run.prefilled_s),
        }
    return measured


def progress_of(run: Run, now_s: float) -> PromptProgress:
    """Return how much of the history of a run is ready: its prompt, and the tokens generated before the run.

    Args:
        run: A run whose first chunk is planned.
        now_s: The time on the scheduler's clock.
    """
    return PromptProgress(
        total_tokens=len(run.tokens),
        cached_tokens=run.cached_tokens,
        processed_tokens=run.n_past,
        time_ms=_ms_since(run.prompt_planned_s, now_s),
    )


def mode_of(request: JobRequest) -> Literal["stream", "generate", "embed"]:
    """Return the `mode` of the stats of a job with this request."""
    if request.embed is not None:
        return "embed"
    return "stream" if request.stream else "generate"


def _ms_since(began_s: float | None, now_s: float) -> float:
    """Return the milliseconds since `began_s`; 0 if it is None, because the measured time has not begun."""
    return 0.0 if began_s is None else _ms(now_s - began_s)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _rate(n_tokens: int, seconds: float) -> float | None:
    """Return tokens per second, or None when the number of tokens or the time is zero."""
    return round(n_tokens / seconds, 2) if n_tokens > 0 and seconds > 0 else None
