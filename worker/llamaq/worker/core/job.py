"""A job inside a worker: what is prepared before it gets a slot, and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from llamaq.common.errors import JobRejected
from llamaq.common.protocol.job_outcome import FinishReason, JobStats
from llamaq.common.protocol.job_request import JobRequest, Priority
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.tokens import pack

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Sampler(Protocol):
    """From logits to a token, for one job."""

    def sample(self, logits: npt.NDArray[np.float32], history: Sequence[int], n_prompt: int) -> int:
        """Draw the token that follows `history`, whose first `n_prompt` tokens are the prompt.

        `logits` has the length of the vocabulary and is the job's own row until the next decode; it may be
        changed. The draw depends on (seed, `len(history) - n_prompt`, history, logits) alone. Raises
        `JobRejected` when nothing may be drawn (an exhausted grammar).
        """

    def close(self) -> None:
        """Free what llama.cpp holds for it; may be called twice."""


class Detokenizer(Protocol):
    """From tokens to text that may be shown: whole UTF-8 characters, no stop string."""

    stopped: bool
    """A stop string was completed; no text follows."""

    def feed(self, token: int) -> str:
        """The text that `token` releases, often none."""

    def finish(self) -> str:
        """What was held back; nothing after a stop string."""


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """A claimed job's place in Redis: what is needed to write for it, and to hand it back.

    Each is equal to itself alone: a Redis that lost its last writes may give the same attempt twice.
    """

    job_id: str
    partition: int
    stream: str
    """Key of the job stream that it was read from."""
    entry_id: str
    """Its entry in that stream."""
    attempt: int
    """The fence: only the newest attempt may write."""

    @property
    def is_urgent(self) -> bool:
        """Whether it is an interactive job's."""
        return self.stream.endswith(f":{Priority.INTERACTIVE}")


@dataclass(slots=True, eq=False)
class Job:
    """A job that is ready to be admitted: tokenized, checked, with its sampler and detokenizer."""

    lease: Lease
    request: JobRequest
    prompt: list[int]
    sampler: Sampler
    detokenizer: Detokenizer
    resumed: list[int] = field(default_factory=list)
    """Tokens that earlier attempts published; the detokenizer and the grammar have seen them."""
    queue_ms: float = 0.0
    context_limit: int = 0
    """The most tokens, prompt and generated, that this job may have."""
    started_s: float = 0.0
    """When this attempt began, by the scheduler's clock, which sets it on submit."""
    first_token_s: float | None = None
    """When this attempt's first token was sampled; a job that is preempted has several runs."""
    turn_until: int = 0
    """It is not preempted before it has generated so many tokens."""
    scope: Scope = field(default_factory=Scope)
    """With whom it may share the cells of its tokens."""
    system_tokens: int = 0
    """So many tokens of the prompt are a chat's system messages, 0 where that is not known."""
    packed: bytes = b""
    """Prompt and resumed tokens, packed; made here, off the engine thread."""

    def __post_init__(self) -> None:
        self.pack()

    def pack(self) -> None:
        """Make `packed` anew, after `resumed` has grown."""
        self.packed = pack([*self.prompt, *self.resumed])

    @property
    def id(self) -> str:
        return self.lease.job_id

    @property
    def reservation(self) -> int:
        """KV cells to reserve before it starts: prompt and `max_tokens`, up to its context limit."""
        return min(len(self.prompt) + self.request.max_tokens, self.context_limit)

    def __repr__(self) -> str:
        return f"<Job {self.id} attempt={self.lease.attempt} prompt={len(self.prompt)} max={self.request.max_tokens}>"


@dataclass(frozen=True, slots=True)
class NewToken:
    """A job has one more token, and `text` became showable with it."""

    job: Job
    token: int
    text: str


@dataclass(frozen=True, slots=True)
class JobEnded:
    """A job left its slot: either `reason` or `error` is set. `text` is the tail that was held back."""

    job: Job
    stats: JobStats
    reason: FinishReason | None = None
    error: JobRejected | None = None
    text: str = ""


Output = NewToken | JobEnded
