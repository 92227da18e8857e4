"""Builds jobs whose tokens are bytes, with a sampler that needs no llama.cpp."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.job_outcome import TokenLogprobs
from llamaq.common.protocol.job_request import JobRequest
from llamaq.worker.core.draft import Drafting
from llamaq.worker.core.job import Job, Lease
from llamaq.worker.core.job_parts import RowDraw
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.generation.detokenizer import StreamDetokenizer
from llamaq.worker.generation.sampling.prompt_scorer import PromptScorer


class ByteVocab:
    """A vocabulary of 258 tokens: the 256 bytes, then BOS and EOS."""

    n_tokens = 258
    bos = 256
    eos = 257
    end_tokens = frozenset({eos})
    chat_template = None

    def encode(self, text: str) -> list[int]:
        """Return BOS and the UTF-8 bytes of the text."""
        return [self.bos, *text.encode()]

    def piece(self, token: int) -> bytes:
        """Return the byte of the token, or no byte for BOS and EOS."""
        return bytes([token]) if token < 256 else b""

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of the tokens."""
        return b"".join(map(self.piece, tokens)).decode(errors="replace")


class GreedySampler:
    """Draws the most probable token.

    Args:
        fails_at: The number of generated tokens after which the sampler raises `JobRejected`. None: never.
    """

    checks_logits = False
    can_prepare = False
    n_largest: int | None = 1

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.logprobs: TokenLogprobs | None = None
        self.draw_probability: float | None = None
        self.closed = 0
        """Number of calls of `close`."""

    def prepare(self, history: Sequence[int], n_prompt: int, n_history: int, draft: Sequence[int]) -> None:
        """Do nothing: there is no grammar."""

    def forced_tokens(self, history: Sequence[int], n_prompt: int) -> Sequence[int]:  # noqa: ARG002 - the protocol's
        return ()

    def row_draw(self, position: int) -> RowDraw | None:  # noqa: ARG002 - part of the protocol
        return None

    def sample(
        self,
        logits: npt.NDArray[np.float32],
        history: Sequence[int],
        n_prompt: int,
        drawn: int | None = None,  # noqa: ARG002 - part of the protocol
    ) -> int:
        self._check_draw(len(history) - n_prompt)
        return int(logits.argmax())

    def sample_largest(
        self,
        tokens: npt.NDArray[np.int32],
        logits: npt.NDArray[np.float32],
        history: Sequence[int],
        n_prompt: int,
    ) -> int:
        self._check_draw(len(history) - n_prompt)
        return int(tokens[logits.argmax()])

    def _check_draw(self, position: int) -> None:
        if self.closed:
            raise AssertionError("the sampler is closed")
        if position == self.fails_at:
            raise JobRejected(ErrorCode.GRAMMAR_EXHAUSTED, "no token may follow")

    def close(self) -> None:
        self.closed += 1


_numbers = count(1)


def make_job(
    prompt: str | Sequence[int] = "Hello",
    *,
    job_id: str | None = None,
    attempt: int = 1,
    resumed: Sequence[int] = (),
    context_limit: int = 1_000_000,
    queue_ms: float | None = None,
    sampler: GreedySampler | None = None,
    drafting: Drafting | None = None,
    **params: Any,
) -> Job:
    """Return a job for `Scheduler.submit`.

    Args:
        prompt: Text, which becomes BOS and its bytes, or tokens.
        job_id: The id of the job. None gives it a new id.
        attempt: The number of the attempt.
        resumed: Tokens that earlier attempts generated.
        context_limit: Upper bound on the tokens of prompt and answer.
        queue_ms: Milliseconds from submit to the first slot, in an earlier attempt. None: the job had no slot so far.
        sampler: The sampler. None gives it a `GreedySampler`.
        drafting: The speculation of the job. None: nothing is drafted.
        **params: Fields of `JobRequest`, such as `max_tokens`.
    """
    tokens = ByteVocab().encode(prompt) if isinstance(prompt, str) else list(prompt)
    request = JobRequest(prompt="", **params)
    detokenizer = StreamDetokenizer(
        ByteVocab().piece,
        request.stop,
        min_tokens=request.min_tokens,
        includes_stop=request.include_stop,
        n_indent=request.n_indent,
    )
    for token in resumed:
        detokenizer.feed(token)
    n_top = None if resumed else request.prompt_logprobs
    return Job(
        lease=Lease(job_id or f"default.0.{next(_numbers):032x}", 0, "jobs", "0-1", attempt),
        request=request,
        prompt=tokens,
        sampler=sampler or GreedySampler(),
        detokenizer=detokenizer,
        generated_before=list(resumed),
        times=JobTimes(queue_ms=queue_ms),
        context_limit=context_limit,
        drafting=drafting,
        prompt_scorer=None if n_top is None else PromptScorer(n_top),
    )
