"""The outputs of jobs: what a scheduler reports of a job, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llamaq.common.errors import JobRejected
from llamaq.common.protocol.embedding_task import Embedding
from llamaq.common.protocol.job_events import PromptProgress
from llamaq.common.protocol.job_outcome import FinishReason, JobStats, TokenLogprobs
from llamaq.common.protocol.prompt_logprobs import PromptLogprobs
from llamaq.worker.core.job import BaseJob, Job


@dataclass(frozen=True, slots=True)
class SlotAcquired:
    """A waiting job has a slot now. Precedes the tokens of the run, and is repeated after each preemption."""

    job: BaseJob


@dataclass(frozen=True, slots=True)
class SlotLost:
    """A running job was preempted: it waits for a slot again. Follows the tokens of the run."""

    job: BaseJob


@dataclass(frozen=True, slots=True)
class PromptAdvanced:
    """More of a job's prompt is ready. Only jobs that ask for `prompt_progress` have this output."""

    job: Job
    progress: PromptProgress


@dataclass(frozen=True, slots=True)
class PromptScored:
    """The probabilities of a prompt's tokens. Precedes the first token of a job that asks for `prompt_logprobs`."""

    job: Job
    prompt_logprobs: PromptLogprobs


class NewToken(NamedTuple):
    """A generated token of a job, and the text that can be published after this token."""

    job: Job
    token: int
    text: str
    time_s: float
    """When the token was generated, on the clock of `JobTimes`."""
    logprobs: TokenLogprobs | None = None
    draw_probability: float | None = None
    tag_offset: int | None = None
    """`Detokenizer.tag_offset` of the token."""
    is_first: bool = False
    """Whether the token is the first one of this attempt."""
    withheld: str = ""
    """`Detokenizer.withheld` after the token."""


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The end of a job in this worker. Exactly one of `reason` and `error` is set."""

    job: BaseJob
    stats: JobStats
    reason: FinishReason | None = None
    error: JobRejected | None = None
    text: str = ""
    """The last text, which the detokenizer had held back."""
    embeddings: tuple[Embedding, ...] | None = None
    """The result of an embedding job that is complete."""


Output = SlotAcquired | SlotLost | PromptAdvanced | PromptScored | NewToken | JobEnded


class TickOutcome(NamedTuple):
    """The outputs of a tick, and how many draft tokens it has accepted."""

    outputs: Sequence[Output]
    """The outputs of all jobs, in order."""
    n_accepted: int = 0
    """Number of draft tokens that became tokens of an output."""
