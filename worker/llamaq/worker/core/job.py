"""A job inside a worker: its prepared input, and the outputs of its run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from llamaq.common.errors import JobRejected
from llamaq.common.protocol.embedding_task import Embedding
from llamaq.common.protocol.job_events import PromptProgress
from llamaq.common.protocol.job_outcome import FinishReason, JobStats
from llamaq.common.protocol.job_request import JobRequest, Priority
from llamaq.common.protocol.token_logprobs import TokenLogprobs
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.core.packed_tokens import pack
from llamaq.worker.core.token_draft import Drafting

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


NOT_NUMBERS = (
    "the model computed logits that are not numbers, or infinite: no token can be drawn. Its file may be damaged, or "
    "its values may be too large for this device (try --flash-attn off, or another quantization)"
)


N_LARGEST = 256
"""Number of largest logits of a row that the device copies to the host, with `--backend-sampling`."""


class Sampler(Protocol):
    """Draws the next token of one job from its logits."""

    checks_logits: bool
    """Whether `sample` raises `JobRejected` if any logit is plus infinity or NaN, and does not use `best`. Then the
    caller need not find the largest logit."""

    can_prepare: bool
    """Whether `prepare` has something to do."""

    n_largest: int | None
    """Number of largest logits that determine each draw: `sample_largest` may be called with these instead of `sample`.
    None: the draws need all logits."""

    logprobs: TokenLogprobs | None
    """The probabilities of the token that was drawn last. None: the job did not ask for them."""
    draw_probability: float | None
    """The probability of the token that was drawn last, if later draws depend on it (Mirostat, adaptive-p)."""

    def prepare(self, history: Sequence[int], n_prompt: int, n_history: int, draft: Sequence[int]) -> None:
        """Compute the part of the next draws that does not depend on the logits: the masks of a grammar.

        Another thread may call this while the logits are computed. If `sample` is called meanwhile, it waits.

        Args:
            history: The prompt, then the generated tokens. It may get further tokens meanwhile.
            n_prompt: The length of the prompt in tokens.
            n_history: The number of tokens before the next draw.
            draft: The tokens that the next draws will probably return.
        """

    def forced_tokens(self, history: Sequence[int], n_prompt: int) -> Sequence[int]:
        """Return the tokens that must follow `history`, as far as `prepare` has found them. Often there is none.

        The draws would return these tokens, whatever the logits are.

        Args:
            history: The prompt, then the generated tokens.
            n_prompt: The length of the prompt in tokens.
        """

    def sample(
        self, logits: npt.NDArray[np.float32], history: Sequence[int], n_prompt: int, best: int | None = None
    ) -> int:
        """Draw the token that follows `history`.

        The draw depends only on the seed, the position `len(history) - n_prompt`, the history, the logits and the
        `draw_probability` of the earlier draws. Each history begins with the history of the last call.

        Args:
            logits: One value for each token of the vocabulary. The sampler may change this array: no other job uses
                it, and the next decode overwrites it.
            history: The prompt, then the generated tokens.
            n_prompt: The length of the prompt in tokens.
            best: The token with the largest logit, if the caller knows it. A greedy sampler need not find it again.

        Raises:
            JobRejected: The grammar allows no token, or a logit is plus infinity or NaN.
        """

    def sample_largest(
        self,
        tokens: npt.NDArray[np.int32],
        logits: npt.NDArray[np.float32],
        history: Sequence[int],
        n_prompt: int,
    ) -> int:
        """Draw the same token as `sample`, from the largest logits alone. Call it only if `n_largest` is not None.

        Args:
            tokens: The tokens with the largest logits, in any order, at least `n_largest` or the whole vocabulary.
            logits: Their logits. The arrays are not changed.
            history: The prompt, then the generated tokens.
            n_prompt: The length of the prompt in tokens.

        Raises:
            JobRejected: One of the largest logits is plus infinity or NaN.
        """

    def close(self) -> None:
        """Free the memory that the sampler holds outside of Python. May be called twice."""


class Detokenizer(Protocol):
    """Turns the tokens of one job into text. The text has only whole UTF-8 characters and no part of a stop string."""

    has_stop_strings: bool
    """Whether a text may end the job."""
    stop_string: str | None
    """The stop string that the generated text contains. After it, no more text is returned. None: there is none."""
    tag_offset: int | None
    """Position of the last token in the text, in characters, if this token is a tag, such as `<tool_call>`. Its text
    may be held back. None: the token is no tag, or the job does not ask for the texts of control tokens."""

    def feed(self, token: int) -> str:
        """Add a token and return the text that can now be published, often an empty string."""

    def finish(self) -> str:
        """Return the text that was held back, or an empty string after a stop string."""


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
        return Priority.INTERACTIVE if self.is_interactive else Priority.BULK

    @property
    def is_interactive(self) -> bool:
        """Whether the job is interactive."""
        return self.stream.endswith(f":{Priority.INTERACTIVE}")


@dataclass(slots=True, eq=False)
class BaseJob:
    """What every job of a worker has, whatever it computes."""

    lease: Lease
    request: JobRequest
    resumed: list[int] = field(default_factory=list, kw_only=True)
    """Tokens that earlier attempts published. The detokenizer and the grammar have processed them already."""
    resumed_logprobs: list[TokenLogprobs] = field(default_factory=list, kw_only=True)
    """The probabilities of these tokens, if the job asked for them."""
    resumed_draws: list[float] = field(default_factory=list, kw_only=True)
    """`Sampler.draw_probability` of each of these tokens, if the sampler has it."""
    resumed_tag_offsets: list[int] = field(default_factory=list, kw_only=True)
    """`Detokenizer.tag_offset` of those of these tokens that have it."""
    times: JobTimes = field(default_factory=JobTimes, kw_only=True)
    received_s: float = field(default=0.0, kw_only=True)
    """When the scheduler received this attempt, on its clock. Its `submit` sets it."""

    @property
    def id(self) -> str:
        return self.lease.job_id

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
    n_out_of_cells: int = 0
    """How often this job lost its slot because cells ran out. Each time doubles the margin of its next admission."""
    scope: Scope = field(default_factory=Scope)
    """The jobs that may share the KV cells of this job."""
    drafting: Drafting | None = None
    """The speculation of this job. None: the next tokens are not drafted."""
    system_tokens: int = 0
    """Number of tokens of the system messages at the start of a chat prompt, 0 when unknown."""
    packed: bytes = b""
    """Prompt and resumed tokens, packed. Packed when the job is created, to save time on the engine thread."""

    def __post_init__(self) -> None:
        self.packed = pack([*self.prompt, *self.resumed])

    def close(self) -> None:
        """Free the sampler."""
        self.sampler.close()

    @property
    def needs_all_logits(self) -> bool:
        """Whether the largest `N_LARGEST` logits do not suffice to draw the next token."""
        n_largest = self.sampler.n_largest
        return n_largest is None or n_largest > N_LARGEST

    @property
    def n_history(self) -> int:
        """Number of tokens that the job has without a slot: its prompt and its resumed tokens."""
        return len(self.prompt) + len(self.resumed)

    @property
    def max_length(self) -> int:
        """The largest number of tokens, prompt and generated, that this job can reach."""
        max_tokens = self.request.max_tokens
        return self.context_limit if max_tokens is None else min(len(self.prompt) + max_tokens, self.context_limit)

    def __repr__(self) -> str:
        return f"<Job {self.id} attempt={self.lease.attempt} prompt={len(self.prompt)} max={self.request.max_tokens}>"


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job that can be admitted, and the text of its resumed tokens."""

    job: BaseJob
    texts: list[str]
    """The text that the detokenizer released for each resumed token."""


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


Output = SlotAcquired | SlotLost | PromptAdvanced | NewToken | JobEnded
