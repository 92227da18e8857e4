"""A job inside a worker: its lease, its prepared input and its state between two runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from llamaq.common.protocol.job_outcome import TokenLogprobs
from llamaq.common.protocol.job_request import JobRequest, Priority
from llamaq.common.protocol.keys import priority_of
from llamaq.common.protocol.prompt_logprobs import PromptLogprobs
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.draft import Drafting
from llamaq.worker.core.job_parts import N_LARGEST, Detokenizer, PromptScorer, Sampler
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.core.packed_tokens import pack


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """A claimed job's entry in Redis, as needed to write its events and to requeue it.

    Leases are compared by identity, because a Redis that lost its last writes may issue the same attempt number twice.
    """

    job_id: str
    partition: int
    stream: str
    """Key of the job stream that the entry was read from."""
    entry_id: str
    """Id of the entry in that stream."""
    attempt: int
    """Number of this attempt, used as a fencing token: only the newest attempt may write."""

    @property
    def priority(self) -> Priority:
        """The priority of the job, which may have changed since the submit."""
        return priority_of(self.stream)


@dataclass(slots=True, eq=False)
class BaseJob:
    """What every job of a worker has, whatever it computes."""

    lease: Lease
    request: JobRequest
    generated_before: list[int] = field(default_factory=list, kw_only=True)
    """Tokens generated before the current run: by earlier attempts, and by runs that were preempted. The detokenizer
    and the grammar have processed them already."""
    times: JobTimes = field(default_factory=JobTimes, kw_only=True)
    received_s: float = field(default=0.0, kw_only=True)
    """When the scheduler received this attempt, on its clock."""

    @property
    def id(self) -> str:
        return self.lease.job_id

    def record_receipt(self, now_s: float) -> None:
        """Record that the scheduler receives this attempt now. If no submit time is known, it is now too."""
        self.received_s = now_s
        if self.times.submitted_s is None:
            self.times.submitted_s = now_s

    def close(self) -> None:
        """Free the memory that the job holds outside of Python. May be called twice."""


@dataclass(slots=True, eq=False)
class Job(BaseJob):
    """A job that can be admitted: tokenized and checked, with its sampler and detokenizer."""

    prompt: list[int]
    sampler: Sampler
    detokenizer: Detokenizer
    context_limit: int = 0
    """The largest number of tokens, prompt and generated, that this job may have."""
    first_token_s: float | None = None
    """Time of this attempt's first sampled token. A preemption does not reset this time."""
    protected_tokens: int = 0
    """A job of higher priority cannot preempt this job until this job has generated this number of tokens."""
    preempted_run: dict[str, Any] = field(default_factory=dict)
    """The fields of `JobStats` that describe the last run that was preempted. Empty: none was."""
    n_out_of_cells: int = 0
    """How often this job lost its slot because cells ran out. Each time doubles the margin of its next admission."""
    scope: Scope = field(default_factory=Scope)
    """The jobs that may share the KV cells of this job."""
    adapter_scales: tuple[float, ...] | None = None
    """The scale of each LoRA adapter of the worker for this job. None: the scales of the worker."""
    drafting: Drafting | None = None
    """The speculation of this job. None: the next tokens are not drafted."""
    system_tokens: int = 0
    """Number of tokens of the system messages at the start of a chat prompt, 0 when unknown."""
    prompt_scorer: PromptScorer | None = None
    """Computes the probabilities of the prompt's tokens. None: the job does not ask for them, or an earlier attempt has
    published them."""
    stop_tokens: frozenset[int] = field(init=False)
    """Tokens that end this job, besides the model's end-of-generation tokens."""
    end_token: int | None = None
    """The token that ended this job. None: no token did."""
    packed: bytes = field(init=False)
    """The prompt and `generated_before`, packed. Packed when the job is created, to save time on the engine thread."""

    def __post_init__(self) -> None:
        self.stop_tokens = frozenset(self.request.stop_token_ids)
        self.packed = pack([*self.prompt, *self.generated_before])

    @property
    def generated_until_s(self) -> float:
        """When `generation_timeout_s` has passed. Infinite: not yet known, or the job has no such limit."""
        limit_s = self.request.generation_timeout_s
        return inf if limit_s is None or self.first_token_s is None else self.first_token_s + limit_s

    def close(self) -> None:
        """Free the sampler."""
        self.sampler.close()

    @property
    def needs_all_logits(self) -> bool:
        """Whether the largest `N_LARGEST` logits do not suffice to draw the next token."""
        n_largest = self.sampler.n_largest
        return n_largest is None or n_largest > N_LARGEST

    @property
    def scores_prompt(self) -> bool:
        """Whether the next run computes the probabilities of the prompt's tokens, and therefore the whole prompt.

        They are complete when the first token is generated.
        """
        return self.prompt_scorer is not None and not self.generated_before

    @property
    def reuses_cells(self) -> bool:
        """Whether the next run may reuse KV cells of other jobs. Cells do not have the logits that scores need."""
        return self.request.cache_prompt and not self.scores_prompt

    @property
    def n_history(self) -> int:
        """Number of tokens that the job has without a slot: its prompt and the tokens generated before."""
        return len(self.prompt) + len(self.generated_before)

    @property
    def max_length(self) -> int:
        """The largest number of tokens, prompt and generated, that this job can reach."""
        max_tokens = self.request.max_tokens
        return self.context_limit if max_tokens is None else min(len(self.prompt) + max_tokens, self.context_limit)

    def __repr__(self) -> str:
        return f"<Job {self.id} attempt={self.lease.attempt} prompt={len(self.prompt)} max={self.request.max_tokens}>"


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job that can be admitted, with the tokens that earlier attempts published."""

    job: BaseJob
    texts: list[str]
    """The text that the detokenizer released for each of these tokens."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """The probabilities of these tokens, if the job asked for them."""
    draws: list[float] = field(default_factory=list)
    """`Sampler.draw_probability` of each of these tokens, if the sampler has it."""
    tag_offsets: list[int] = field(default_factory=list)
    """`Detokenizer.tag_offset` of those of these tokens that have it."""
    prompt_logprobs: PromptLogprobs | None = None
    """The probabilities of the prompt's tokens, if earlier attempts have published them."""
    finish_preparation: Callable[[], None] | None = None
    """The rest of the preparation, which may run while the prompt is computed. If the job needs its result earlier, the
    job waits, or does it itself. None: there is no rest."""
