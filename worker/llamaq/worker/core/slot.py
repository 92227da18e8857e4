"""Slots and the table of their state transitions. A worker runs at most one job in each slot."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum

from llamaq.common.protocol.job_outcome import CacheTier
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.prompt_logprobs import PromptLogprobs, ScoredToken, row_bytes
from llamaq.common.protocol.queue_and_worker_state import SlotSnapshot
from llamaq.worker.core.admission import Admission
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.job import Job
from llamaq.worker.core.packed_tokens import TOKEN_BYTES, pack


class SlotState(Enum):
    """The activity of a slot."""

    IDLE = "idle"
    """Has no job."""
    FOLLOW = "follow"
    """Waits until the prefill of another job has computed the prefix that both prompts share."""
    LOAD = "load"
    """Waits for cells that are loaded from host memory or disk."""
    PREFILL = "prefill"
    """Computes the prompt, or tokens that have lost their cells."""
    DECODE = "decode"
    """Generates tokens."""


# A slot goes from IDLE to PREFILL, then to DECODE, then back to IDLE. A job in PREFILL may first wait until another job
# has computed cells (FOLLOW) or a transfer has loaded them (LOAD). A job may end in any state. If a job loses cells,
# its slot goes back to PREFILL.
TRANSITIONS: dict[SlotState, frozenset[SlotState]] = {
    SlotState.IDLE: frozenset({SlotState.PREFILL}),
    SlotState.FOLLOW: frozenset({SlotState.PREFILL, SlotState.IDLE}),
    SlotState.LOAD: frozenset({SlotState.PREFILL, SlotState.IDLE}),
    SlotState.PREFILL: frozenset({SlotState.FOLLOW, SlotState.LOAD, SlotState.DECODE, SlotState.IDLE}),
    SlotState.DECODE: frozenset({SlotState.PREFILL, SlotState.IDLE}),
}

COMPUTING = (SlotState.PREFILL, SlotState.DECODE)
"""The states in which a slot has tokens for the next batch. A tuple, because the hash of an `Enum` is slow."""

TIERS_BY_DISTANCE = list(CacheTier)
"""The cache tiers, ordered by their distance from the device, nearest first."""


@dataclass(slots=True, eq=False)
class Run:
    """A job in a slot: its sequence and its progress."""

    job: Job
    """The job."""
    seq_id: int
    """The sequence of llama.cpp that the job runs in."""
    tokens: list[int]
    """The history: the prompt, then the generated tokens."""
    n_past: int = 0
    """Number of tokens at the start of the history whose KV cells the sequence holds."""
    admission_number: int = 0
    """Position in the order of admissions. A later run has a larger number."""
    packed: bytes = b""
    """The packed history at admission."""
    checkpoints: list[int] = field(default_factory=list)
    """Ascending positions at which a prefill chunk must end, because the state there will be copied."""
    leader: Run | None = None
    """In FOLLOW: the run whose prefill computes the shared prefix."""
    awaited_tokens: int = 0
    """In FOLLOW: the length of the shared prefix, in tokens."""
    cached_tokens: int = 0
    """Number of tokens in `n_past` whose cells were copied or loaded, not computed."""
    tier: CacheTier | None = None
    """The tier that the cached tokens came from. With several tiers: the one farthest from the device."""
    admission: Admission = field(default_factory=Admission)
    """The cells that the admission found in the prefix cache, and its evictions."""
    n_adjacent_copied: int = sys.maxsize
    """The cells after the first `n_adjacent_copied` tokens are scattered in the sequence that they were copied from."""
    is_released: bool = False
    """Whether the run has left its slot."""
    is_suspected: bool = False
    """Whether the data of its cells may be NaN. They are not cached then."""
    prompt_rows: bytearray = field(default_factory=bytearray)
    """The rows of `PromptLogprobs` of the tokens whose probabilities are known, if the job asks for them."""
    prompt_planned_s: float | None = None
    """When the first chunk of this run was planned, on the scheduler's clock, if the job asks for `prompt_progress`."""
    admitted_s: float = 0.0
    """Time of admission on the scheduler's clock."""
    prefilled_s: float | None = None
    """Time of this run's first sampled token on the scheduler's clock."""
    priority: Priority = field(init=False)
    """The priority of the job."""
    max_length: int = field(init=False)
    """The largest number of tokens, prompt and generated, that the job can reach."""

    def __post_init__(self) -> None:
        self.priority, self.max_length = self.job.request.priority, self.job.max_length

    @property
    def n_prompt(self) -> int:
        """Number of tokens in the prompt."""
        return len(self.job.prompt)

    @property
    def n_adjacent(self) -> int:
        """Number of tokens at the start whose cells are adjacent: chunks of a prompt are computed at once."""
        return min(self.n_prompt, self.n_adjacent_copied)

    @property
    def n_generated(self) -> int:
        """Number of generated tokens, over all attempts."""
        return len(self.tokens) - self.n_prompt

    @property
    def n_pending(self) -> int:
        """Number of tokens of the history that are not in KV memory yet: 1 in DECODE, 1 or more in PREFILL."""
        return len(self.tokens) - self.n_past

    @property
    def scores_prompt(self) -> bool:
        """Whether the run computes the probabilities of the prompt's tokens now."""
        return self.job.scores_prompt and len(self.tokens) == self.n_prompt

    @property
    def n_unscored(self) -> int:
        """Number of tokens of the prompt after `n_past` whose logits give the probability of a next prompt token."""
        return max(0, self.n_prompt - 1 - self.n_past)

    def add_prompt_rows(self, rows: bytes) -> None:
        """Add the rows that the last chunk has computed. Rows of tokens whose cells were lost are computed again.

        Invariant: there is a row for each token whose logits were computed, except for the last token of the prompt.
        """
        self.prompt_rows += rows
        del self.prompt_rows[self.n_prompt_row_bytes :]

    @property
    def n_prompt_row_bytes(self) -> int:
        """Size of the rows of the tokens whose logits were computed, 0 if the job does not ask for probabilities."""
        scorer = self.job.prompt_scorer
        return 0 if scorer is None else (self.n_prompt - 1 - self.n_unscored) * row_bytes(scorer.n_top)

    def prompt_logprobs(self, end: ScoredToken | None) -> PromptLogprobs:
        """Return the probabilities of the whole prompt, with the end token that the model drew after it."""
        n_top = 0 if self.job.prompt_scorer is None else self.job.prompt_scorer.n_top
        return PromptLogprobs(tuple(self.job.prompt), n_top, bytes(self.prompt_rows), end)

    def promised_cells(self, margin: int) -> int:
        """Return how many cells the job still needs for its history and for the next `margin` tokens."""
        return max(0, min(len(self.tokens) + margin, self.max_length) - self.n_past)

    @property
    def is_preemptible(self) -> bool:
        """Whether a job of higher priority may preempt this job."""
        return self.n_generated >= self.job.protected_tokens

    def add_cached(self, n_tokens: int, tier: CacheTier) -> None:
        """Record that cells were copied or loaded from `tier`, and that the sequence now holds `n_tokens` tokens."""
        self.cached_tokens += n_tokens - self.n_past
        self.n_past = n_tokens
        self.tier = tier if self.tier is None else max(self.tier, tier, key=TIERS_BY_DISTANCE.index)

    def packed_history(self, n_tokens: int) -> bytes:
        """Return the first `n_tokens` of the history, packed."""
        n_packed = len(self.packed) // TOKEN_BYTES
        if n_tokens <= n_packed:
            return self.packed[: n_tokens * TOKEN_BYTES]
        return self.packed + pack(self.tokens[n_packed:n_tokens])


@dataclass(slots=True, eq=False)
class Slot:
    """One slot of a worker. `run` is None when the state is IDLE, and is set in every other state."""

    index: int
    """Index of the slot, from 0 on."""
    state: SlotState = SlotState.IDLE
    """What the slot does."""
    run: Run | None = None
    """The run in the slot. None: the slot is idle."""
    content: bytes = b""
    """The packed history of the last job in this slot. A job whose prompt begins with the same tokens prefers this
    slot."""
    scope: Scope = field(default_factory=Scope)
    """The jobs that may share the cells of `content`."""
    release_number: int = 0
    """Position in the order of releases. A slot that was released later has a larger number."""

    @property
    def active(self) -> Run:
        """The run in the slot.

        Raises:
            LookupError: The slot is idle.
        """
        if self.run is None:
            raise LookupError(f"{self!r} runs no job")
        return self.run

    @property
    def n_pending(self) -> int:
        """Number of tokens of the history that are not in KV memory yet, 0 when the slot is idle."""
        return self.run.n_pending if self.run else 0

    @property
    def priority(self) -> Priority | None:
        """The priority of the running job. None: the slot is idle."""
        return self.run.priority if self.run else None

    def snapshot(self) -> SlotSnapshot:
        """Return the public state of the slot."""
        run = self.run
        if run is None:
            n_content = len(self.content) // TOKEN_BYTES
            return SlotSnapshot(index=self.index, state=self.state.value, content_tokens=n_content)
        return SlotSnapshot(
            index=self.index,
            state=self.state.value,
            job_id=run.job.id,
            prompt_tokens=run.n_prompt,
            cached_tokens=run.cached_tokens,
            prefilled_tokens=min(run.n_past, run.n_prompt),
            generated_tokens=run.n_generated,
            max_generated_tokens=run.max_length - run.n_prompt,
            content_tokens=run.n_past,
        )

    def transition_to(self, state: SlotState) -> None:
        """Change the state.

        Raises:
            ValueError: `TRANSITIONS` does not allow the change.
        """
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"{self!r} cannot change to {state.name}")
        self.state = state

    def __repr__(self) -> str:
        if self.run is None:
            return f"<Slot {self.index} {self.state.name}>"
        run = self.run
        if self.state is not SlotState.DECODE:
            progress = f"{run.n_past}/{len(run.tokens)}"
        else:
            progress = f"{run.n_generated}/{run.max_length - run.n_prompt}"
        return f"<Slot {self.index} {self.state.name} {progress} job={run.job.id}>"
