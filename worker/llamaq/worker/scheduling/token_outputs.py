"""Makes the output of a sampled token: its text and its probabilities."""

from __future__ import annotations

from llamaq.worker.core.batch import SampledToken
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import NewToken


def new_token(job: Job, sampled: SampledToken, time_s: float, *, is_first: bool = False) -> NewToken:
    """Return the output of the next token of a job. Adds the token to the detokenizer of the job.

    Args:
        job: The job.
        sampled: The token.
        time_s: When it was sampled, on the clock of `JobTimes`.
        is_first: Whether it is the first token of this attempt.
    """
    token, logprobs, draw_probability = sampled
    detokenizer = job.detokenizer
    text = detokenizer.feed(token)
    tag_offset, withheld = detokenizer.tag_offset, detokenizer.withheld
    return NewToken(job, token, text, time_s, logprobs, draw_probability, tag_offset, is_first, withheld)
