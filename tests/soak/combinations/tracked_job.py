"""A job of a round, and the output that it has published so far."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import TokenSpan
from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.common.protocol.job_request import JobRequest
from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.prompt_logprobs import PromptLogprobs
from llamaq.worker.core.job import Job, Lease, PreparedJob
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.core.outputs import JobEnded, NewToken
from llamaq.worker.generation.job_preparer import JobPreparer


@dataclass(eq=False)
class TrackedJob:
    """A job that is submitted once, and run by one attempt after the other."""

    id: str
    request: JobRequest
    published: list[NewToken] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    """The probabilities of the prompt. Like the worker, the test publishes them with the first token."""
    end: JobEnded | None = None
    refusal: str | None = None
    """Why the preparer has refused the job. None: it has not."""
    lease: Lease | None = None
    """The lease of the attempt that runs. None: no attempt runs."""
    prompt: list[int] = field(default_factory=list)
    n_attempts: int = 0
    is_cancelled: bool = False

    @property
    def is_done(self) -> bool:
        return self.end is not None or self.refusal is not None

    @property
    def tokens(self) -> list[int]:
        return [each.token for each in self.published]

    @property
    def text(self) -> str:
        return "".join(each.text for each in self.published) + (self.end.text if self.end else "")

    @property
    def reason(self) -> FinishReason | None:
        """Why the job has finished. None: it has failed, or it has not ended."""
        return self.end.reason if self.end else None

    def lose_after(self, n_published: int) -> None:
        """Forget the tokens that were not published, and the probabilities of the prompt if none was."""
        del self.published[n_published:]
        if not self.published:
            self.prompt_logprobs = None

    def prepare(self, preparer: JobPreparer, n_published: int | None = None) -> PreparedJob:
        """Return the job that continues after its published tokens, or after the first `n_published` of them.

        Raises:
            JobRejected: The job cannot run on this model.
        """
        first = self.published[:n_published]
        span = TokenSpan(
            offset=0,
            tokens=tuple(each.token for each in first),
            text_offset=0,
            text="".join(each.text for each in first),
            logprobs=tuple(each.logprobs for each in first if each.logprobs is not None),
            draws=tuple(each.draw_probability for each in first if each.draw_probability is not None),
        )
        stream = Keys().jobs("combinations", 0, self.request.priority)
        lease = Lease(self.id, 0, stream, f"{self.n_attempts}-0", self.n_attempts)
        payload = codec.encode_request(self.request, codec.MAX_EVENT_BYTES)
        return preparer.prepare(payload, lease, span, JobTimes(submitted_s=time.monotonic()))

    def __repr__(self) -> str:
        return f"{self.id[-3:]} attempt={self.n_attempts} {self.request.model_dump(exclude_defaults=True)}"


def job_of(prepared: PreparedJob) -> Job:
    """Return the job of a worker that generates text."""
    job = prepared.job
    if not isinstance(job, Job):
        raise TypeError(f"{job!r} generates no text")
    return job
