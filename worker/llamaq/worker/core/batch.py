"""The batch of one tick, made of decode tokens and prefill chunks, and the engine's result for each part.

Each tick makes one part and one result for each slot. They are named tuples, which are made in a quarter of the time
of a frozen dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from llamaq.common.errors import JobRejected
from llamaq.common.protocol.job_outcome import TokenLogprobs
from llamaq.worker.core.draft import NO_DRAFT, Draft
from llamaq.worker.core.draft_plan import NO_DRAFT_PLAN, NO_DRAFT_WORK, DraftPlan, DraftWork
from llamaq.worker.core.slot import Slot


class TickBatch(Protocol):
    """What one tick computes. An empty batch is false."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""

    @property
    def n_decode(self) -> int:
        """Number of decode tokens, one for each generating slot."""

    @property
    def n_prefill(self) -> int:
        """Number of prompt tokens."""

    @property
    def n_drafts(self) -> int:
        """Number of drafts."""

    @property
    def n_drafted(self) -> int:
        """Number of tokens of the drafts."""

    @property
    def n_forced(self) -> int:
        """Number of tokens that grammars force."""

    @property
    def n_jobs(self) -> int:
        """Number of jobs with tokens in the batch."""

    def __bool__(self) -> bool: ...


class DecodeToken(NamedTuple):
    """The last sampled token of a slot in DECODE. The engine samples the next token from its logits.

    With a draft, the engine computes the tokens of the draft too. As long as each sampled token equals the next token
    of the draft, it samples one more.

    With forced tokens, the engine computes these tokens too, without logits, and samples the token after them.
    """

    slot: Slot
    """The slot, in the state DECODE."""
    draft: Draft = NO_DRAFT
    """Tokens that may follow. The scheduler or the draft model adds them, never the strategy."""
    forced: tuple[int, ...] = ()
    """Tokens that must follow, because a grammar allows no others. The scheduler adds them. Then there is no draft."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens of the slot in the batch: the sampled token, its draft and its forced tokens."""
        return 1 + len(self.draft.tokens) + len(self.forced)


class PrefillChunk(NamedTuple):
    """The next `n_tokens` pending tokens of a slot in PREFILL. The engine samples after the last chunk only."""

    slot: Slot
    """The slot, in the state PREFILL."""
    n_tokens: int
    """Number of tokens, from 1 to `slot.n_pending`."""

    @property
    def n_scored(self) -> int:
        """Number of tokens at the start of the chunk whose logits give the probability of the next prompt token."""
        run = self.slot.active
        return min(self.n_tokens, run.n_unscored) if run.scores_prompt else 0

    @property
    def is_last(self) -> bool:
        """Whether no pending token is left after the chunk, so that the engine samples after it."""
        return self.n_tokens == self.slot.n_pending


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of one `llama_decode` call. It contains at most one part for each slot."""

    decode: tuple[DecodeToken, ...] = ()
    """One token for each generating slot, with its draft."""
    prefill: tuple[PrefillChunk, ...] = ()
    """The chunks of prompts."""
    draft_plan: DraftPlan = NO_DRAFT_PLAN
    """What the draft model computes before the batch, to add drafts to it. Only the scheduler makes this plan."""
    draft_work: DraftWork = NO_DRAFT_WORK
    """What the draft model has computed for the plan."""

    @property
    def parts(self) -> tuple[DecodeToken | PrefillChunk, ...]:
        """The parts of all slots, decode tokens first."""
        return (*self.decode, *self.prefill)

    @property
    def n_decode(self) -> int:
        """Number of decode tokens, one for each generating slot."""
        return len(self.decode)

    @property
    def n_prefill(self) -> int:
        """Number of prompt tokens."""
        return sum([chunk.n_tokens for chunk in self.prefill])

    @property
    def n_drafts(self) -> int:
        """Number of drafts that have a token."""
        return sum([part.draft.tokens != () for part in self.decode])

    @property
    def n_drafted(self) -> int:
        """Number of tokens of the drafts."""
        return sum([len(part.draft.tokens) for part in self.decode])

    @property
    def n_forced(self) -> int:
        """Number of tokens that grammars force."""
        return sum([len(part.forced) for part in self.decode])

    @property
    def has_draft_work(self) -> bool:
        """Whether there is a draft, or something to compute for the draft model."""
        return self.draft_plan is not NO_DRAFT_PLAN or self.n_drafts > 0

    @property
    def n_tokens(self) -> int:
        """Number of all tokens of the batch."""
        return self.n_decode + self.n_drafted + self.n_forced + self.n_prefill

    @property
    def n_jobs(self) -> int:
        """Number of jobs with tokens in the batch."""
        return len(self.decode) + len(self.prefill)

    def without_drafts(self) -> Batch:
        """Return the batch without its drafts."""
        if not self.n_drafts:
            return self
        return replace(self, decode=tuple([part._replace(draft=NO_DRAFT) for part in self.decode]))

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)


class SampledToken(NamedTuple):
    """A token that the engine has sampled."""

    token: int
    logprobs: TokenLogprobs | None = None
    """`Sampler.logprobs` after the draw."""
    draw_probability: float | None = None
    """`Sampler.draw_probability` after the draw."""


class SlotResult(NamedTuple):
    """The engine's result for one slot of the batch."""

    slot: Slot
    n_past: int
    """Number of tokens of the history, and then of the draft, that the sequence now holds. Smaller than before when
    cells were lost."""
    sampled: tuple[SampledToken, ...] = ()
    """The sampled tokens. Empty while a part of the history is still pending. All but the last one are the first tokens
    of the draft, so that without a draft there is at most one."""
    error: JobRejected | None = None
    """The reason why this job fails, after the sampled tokens."""
    no_room: bool = False
    """True when KV memory has no room for the slot's part, even in a batch without other parts. The sequence is then
    unchanged."""
    prompt_rows: bytes = b""
    """The rows of `PromptLogprobs` that a chunk has computed, if its run scores the prompt."""
