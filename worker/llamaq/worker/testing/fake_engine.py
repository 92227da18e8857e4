"""An engine without a model, which checks more than llama.cpp does.

It checks that positions are consecutive, that a sequence belongs to one job and holds the job's tokens, and that cells
and batch stay within their limits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.worker.core.batch import Batch, DecodeToken, PrefillChunk, SampledToken, SlotResult
from llamaq.worker.core.finish_rules import ALL_NAN
from llamaq.worker.core.slot import Run, SlotState
from llamaq.worker.testing.fake_job import ByteVocab
from llamaq.worker.testing.fake_memory import FakeMemory

NextToken = Callable[[Sequence[int]], int]
"""Maps a history to the token that the fake model considers most probable next."""


def next_letter(history: Sequence[int]) -> int:
    """Return a letter from a to z that depends on every token of the history and on its length."""
    return ord("a") + sum((at + 1) * token for at, token in enumerate(history, len(history))) % 26


class FakeEngine:
    """Runs batches without a model. The next token is a function of the history.

    Args:
        n_ctx: Number of KV cells. A batch that needs more raises `AssertionError`, unless `reports_no_room` is set.
        n_batch: Upper bound on the tokens of one batch.
        n_seq_max: Number of sequences. See `FakeMemory`.
        n_ctx_train: The longest context that the model was trained on, in tokens.
        next_token: Returns the most probable token after a history.
        can_cut: Whether a sequence can be cut and copied in part. See `FakeMemory`.
        kv_unified: Whether sequences share one pool of cells. See `FakeMemory`.
        reports_no_room: Whether a part without enough cells is reported as `SlotResult.no_room`, as the engine does.
    """

    def __init__(
        self,
        *,
        n_ctx: int = 4096,
        n_batch: int = 512,
        n_seq_max: int = 64,
        n_ctx_train: int = 32_768,
        next_token: NextToken = next_letter,
        can_cut: bool = True,
        kv_unified: bool = True,
        reports_no_room: bool = False,
    ) -> None:
        self.sequences = FakeMemory(n_ctx=n_ctx, n_seq_max=n_seq_max, can_cut=can_cut, kv_unified=kv_unified)
        self.n_batch = n_batch
        self.n_ctx_train = n_ctx_train
        self.vocab = ByteVocab()
        self.computed = 0
        """Tokens computed by batches. Tokens that were copied or loaded are not counted."""
        self.batches: list[Batch] = []
        """All batches that were run, in order."""
        self._next_token = next_token
        self._reports_no_room = reports_no_room
        self._failing: dict[str, JobRejected] = {}
        self._losing: dict[str, int] = {}
        self._spoiling: set[str] = set()
        self._refusals = 0

    @property
    def n_vocab(self) -> int:
        return self.vocab.n_tokens

    def run(self, batch: Batch) -> list[SlotResult]:
        """Compute the batch, and sample a token for each slot whose tokens are then all computed."""
        self._check(batch)
        self.batches.append(batch)
        if self._refusals and batch:
            self._refusals -= 1
            return [SlotResult(part.slot, part.slot.active.n_past, no_room=True) for part in batch.parts]
        return [self._run_part(part) for part in batch.parts]

    def close(self) -> None:
        """Remove all cells."""
        for seq_id in self.sequences.memory:
            self.sequences.remove(seq_id)

    # ---- injected failures

    def fail_job(
        self, job_id: str, code: ErrorCode = ErrorCode.DECODE_FAILED, message: str = "injected failure"
    ) -> None:
        """Report this error for the job in every later batch."""
        self._failing[job_id] = JobRejected(code, message)

    def lose_cells(self, job_id: str, n_past: int = 0) -> None:
        """In the job's next batch, lose all of its cells except the first `n_past`."""
        self._losing[job_id] = n_past

    def spoil_cells(self, job_id: str) -> None:
        """Compute cells for the job whose data are not numbers. All logits are spoiled until the cells are cleared."""
        self._spoiling.add(job_id)

    def is_spoiling(self, job_id: str) -> bool:
        """Whether `spoil_cells` was called for the job."""
        return job_id in self._spoiling

    def refuse(self, n_batches: int = 1) -> None:
        """Report every part of the next `n_batches` batches as `SlotResult.no_room`."""
        self._refusals += n_batches

    # ---- one batch

    def _run_part(self, part: DecodeToken | PrefillChunk) -> SlotResult:
        slot, run = part.slot, part.slot.active
        if error := self._failing.get(run.job.id):
            return SlotResult(slot, run.n_past, error=error)
        if run.job.id in self._losing:
            n_left = min(self._losing.pop(run.job.id), self.sequences.n_held(run.seq_id))
            return SlotResult(slot, self.sequences.cut(run.seq_id, n_left))
        if self._reports_no_room and not self.sequences.has_room(run.seq_id, part.n_tokens):
            return SlotResult(slot, run.n_past, no_room=True)
        draft, forced = (part.draft.tokens, part.forced) if isinstance(part, DecodeToken) else ((), ())
        n_own = part.n_tokens - len(draft) - len(forced)
        self.sequences.append(run.seq_id, [*run.tokens[run.n_past : run.n_past + n_own], *draft, *forced])
        self.computed += part.n_tokens
        self.sequences.is_spoiled |= run.job.id in self._spoiling
        n_past = self.sequences.n_held(run.seq_id)
        prompt_rows = self._score(run, part.n_scored) if isinstance(part, PrefillChunk) else b""
        if n_past < len(run.tokens):
            return SlotResult(slot, n_past, prompt_rows=prompt_rows)
        if self.sequences.is_spoiled:
            return SlotResult(slot, n_past, error=JobRejected(ErrorCode.DECODE_FAILED, ALL_NAN))
        sampled = [SampledToken(token) for token in forced]
        try:
            for drafted in (*draft, None):
                sampled.append(self._sample(run, [one.token for one in sampled]))
                if sampled[-1].token != drafted:
                    break
        except JobRejected as exc:
            return SlotResult(slot, n_past, tuple(sampled), error=exc)
        return SlotResult(slot, n_past, tuple(sampled), prompt_rows=prompt_rows)

    def _score(self, run: Run, n_tokens: int) -> bytes:
        """Return the probabilities of the next `n_tokens` tokens of the prompt."""
        if run.job.prompt_scorer is None or not n_tokens:
            return b""
        ends = range(run.n_past + 1, run.n_past + 1 + n_tokens)
        rows = np.array([self._logits(run.tokens[:end]) for end in ends])
        return run.job.prompt_scorer.score(rows, [run.tokens[end] for end in ends])

    def _logits(self, history: Sequence[int]) -> npt.NDArray[np.float32]:
        logits = np.zeros(self.n_vocab, np.float32)
        logits[self._next_token(tuple(history))] = 1
        return logits

    def _sample(self, run: Run, accepted: Sequence[int]) -> SampledToken:
        history = [*run.tokens, *accepted]
        sampler = run.job.sampler
        token = sampler.sample(self._logits(history), history, run.n_prompt)
        return SampledToken(token, sampler.logprobs, sampler.draw_probability)

    def _check(self, batch: Batch) -> None:
        """Raise `AssertionError` for a batch that llama.cpp refuses or computes wrongly."""
        if batch.n_tokens > self.n_batch:
            raise AssertionError(f"{batch.n_tokens} tokens in a batch of at most {self.n_batch}")
        runs = [part.slot.active for part in batch.parts]
        if len({run.seq_id for run in runs}) < len(runs):
            raise AssertionError(f"a sequence is in the batch twice: {batch}")
        for part, run in zip(batch.parts, runs, strict=True):
            if self.sequences.tokens(run.seq_id) != run.tokens[: run.n_past]:
                raise AssertionError(f"sequence {run.seq_id} does not hold the tokens of {part.slot!r}")
            expected = SlotState.DECODE if isinstance(part, DecodeToken) else SlotState.PREFILL
            n_ahead = len(part.draft) + len(part.forced) if isinstance(part, DecodeToken) else 0
            if part.slot.state is not expected or not 1 <= part.n_tokens - n_ahead <= run.n_pending:
                raise AssertionError(f"{part!r} does not fit {part.slot!r}")
