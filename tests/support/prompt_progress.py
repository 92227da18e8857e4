"""Publishes how much of the prompt of a fake worker's job is computed."""

from __future__ import annotations

from dataclasses import replace

from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import PromptProgress
from llamaq.producer.testing import LEASE_MS, FakeAttempt


async def emit_progress(
    attempt: FakeAttempt, processed_tokens: int, total_tokens: int, *, cached_tokens: int = 0
) -> None:
    """Publish the progress, as a worker does for a job with `prompt_progress`.

    Args:
        attempt: The job.
        processed_tokens: Number of tokens that are ready.
        total_tokens: Number of tokens to process.
        cached_tokens: Number of the tokens that came from the prefix cache.
    """
    event = PromptProgress(
        total_tokens=total_tokens, cached_tokens=cached_tokens, processed_tokens=processed_tokens, time_ms=0.0
    )
    increment = replace(attempt.increment(), progress=(codec.encode_event(event),))
    await attempt.worker.scripts.flush([increment], LEASE_MS, renew=False)
