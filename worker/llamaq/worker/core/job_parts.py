"""The parts of a job that the packages above implement: its sampler and its detokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from llamaq.common.protocol.job_outcome import TokenLogprobs

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

N_LARGEST = 256
"""Number of largest logits of a row that the device copies to the host, with `--backend-sampling`."""


class RowDraw(NamedTuple):
    """A draw that depends on the logits of one row alone: top-k, top-p, min-p and the temperature, in this order."""

    k: int
    top_p: float
    min_p: float
    min_keep: int
    temperature: float
    masked: tuple[int, ...]
    """Tokens that are not drawn."""
    uniform: float
    """A random number in [0, 1)."""


BEST = RowDraw(1, 1.0, 0.0, 0, 1.0, (), 0.0)
"""Draws the token with the largest logit, the first one of several."""


class Sampler(Protocol):
    """Draws the next token of one job from its logits."""

    checks_logits: bool
    """Whether `sample` raises `JobRejected` if any logit is plus infinity or NaN. If not, the caller checks the largest
    one."""

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

    def row_draw(self, position: int) -> RowDraw | None:
        """Return how a token is drawn. None: the draw depends on more than the logits, or does more.

        Args:
            position: The number of generated tokens before the token.
        """

    def sample(
        self, logits: npt.NDArray[np.float32], history: Sequence[int], n_prompt: int, drawn: int | None = None
    ) -> int:
        """Draw the token that follows `history`.

        The draw depends only on the seed, the position `len(history) - n_prompt`, the history, the logits and the
        `draw_probability` of the earlier draws. Each history begins with the history of the last call.

        Args:
            logits: One value for each token of the vocabulary. The sampler may change this array: no other job uses
                it, and the next decode overwrites it.
            history: The prompt, then the generated tokens.
            n_prompt: The length of the prompt in tokens.
            drawn: The token that the caller has drawn as `row_draw` says; unless `checks_logits`, the token with the
                largest logit. None: the caller has drawn none.

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


class PromptScorer(Protocol):
    """Computes the probabilities of a prompt's tokens, in the form of `PromptLogprobs`."""

    n_top: int
    """Number of alternatives at each position."""

    def score(self, rows: npt.NDArray[np.float32], tokens: Sequence[int]) -> bytes:
        """Return the rows of `PromptLogprobs` for some tokens of the prompt.

        Args:
            rows: The logits at the position before each of these tokens, shape (n_tokens, n_vocab). They are not
                changed.
            tokens: The tokens.

        Raises:
            JobRejected: A logit is plus infinity or NaN.
        """


class Detokenizer(Protocol):
    """Turns the tokens of one job into text. The text has only whole UTF-8 characters and no part of a stop string."""

    may_end: bool
    """Whether the text may end the job."""
    has_ended: bool
    """Whether the text has ended the job. After that, no more text is returned."""
    stop_string: str | None
    """The stop string that has ended the text. None: none did."""
    tag_offset: int | None
    """Position of the last token in the text, in characters, if this token is a tag, such as `<tool_call>`. Its text
    may be held back. None: the token is no tag, or the job does not ask for the texts of control tokens."""

    @property
    def withheld(self) -> str:
        """The text that `finish` would return now."""

    def feed(self, token: int) -> str:
        """Add a token and return the text that can now be published, often an empty string."""

    def finish(self) -> str:
        """Return the text that was held back, or an empty string after the end of the text."""
