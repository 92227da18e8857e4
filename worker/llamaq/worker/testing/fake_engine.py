"""For tests without a model: an engine whose cells are objects, a vocabulary of bytes, and a builder of jobs.

`FakeEngine` has the surface of the real engine and checks more than llama.cpp does: that positions follow one
another, that a sequence belongs to one job and holds its tokens, that cells and batch keep their bounds.

    engine = FakeEngine(n_ctx=256)
    scheduler = Scheduler(SlotPool(4, engine.sequences.n_ctx, 4), engine.sequences, budget=64, chunk_size=16,
                          end_tokens=engine.vocab.end_tokens)
    scheduler.submit(make_job("Hello", max_tokens=5))
    outputs = run_to_end(scheduler, engine)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.job_request import JobRequest
from llamaq.worker.core.batch import Batch, DecodeToken, PrefillChunk, SlotResult
from llamaq.worker.core.job import Job, Lease, Output
from llamaq.worker.core.slot import Run, SlotState
from llamaq.worker.generation.detokenizer import StreamDetokenizer
from llamaq.worker.scheduling.scheduler import Scheduler
from llamaq.worker.testing.fake_memory import FakeMemory

NextToken = Callable[[Sequence[int]], int]
"""From a history to the token that the fake model thinks most probable next."""


class ByteVocab:
    """256 tokens that are bytes, then BOS and EOS."""

    n_tokens = 258
    bos = 256
    eos = 257
    end_tokens = frozenset({eos})
    chat_template = None

    def encode(self, text: str) -> list[int]:
        """BOS, then the bytes of the text."""
        return [self.bos, *text.encode()]

    def piece(self, token: int) -> bytes:
        """The byte that the token stands for; none for BOS and EOS."""
        return bytes([token]) if token < 256 else b""

    def decode(self, tokens: Iterable[int]) -> str:
        return b"".join(map(self.piece, tokens)).decode(errors="replace")


class GreedySampler:
    """Takes the most probable token; can be told to refuse at a given token."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.closed = 0

    def sample(self, logits: npt.NDArray[np.float32], history: Sequence[int], n_prompt: int) -> int:
        if self.closed:
            raise AssertionError("the sampler is closed")
        if len(history) - n_prompt == self.fails_at:
            raise JobRejected(ErrorCode.GRAMMAR_EXHAUSTED, "no token may follow")
        return int(logits.argmax())

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
    queue_ms: float = 0.0,
    sampler: GreedySampler | None = None,
    **params: Any,
) -> Job:
    """A job that is ready for `Scheduler.submit`; `params` are those of `JobRequest`."""
    tokens = ByteVocab().encode(prompt) if isinstance(prompt, str) else list(prompt)
    request = JobRequest(prompt="", **params)
    detokenizer = StreamDetokenizer(ByteVocab(), request.stop)
    for token in resumed:
        detokenizer.feed(token)
    return Job(
        lease=Lease(job_id or f"default.0.{next(_numbers):032x}", 0, "jobs", "0-1", attempt),
        request=request,
        prompt=tokens,
        sampler=sampler or GreedySampler(),
        detokenizer=detokenizer,
        resumed=list(resumed),
        queue_ms=queue_ms,
        context_limit=context_limit,
    )


class ManualClock:
    """A monotonic clock that stands still until somebody moves `now_s`."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def run_tick(scheduler: Scheduler, engine: FakeEngine) -> list[Output]:
    """One tick, as a worker makes it, with all integrity checks."""
    scheduler.expire()
    scheduler.admit()
    scheduler.check_integrity()
    scheduler.move(0.0)
    scheduler.check_integrity()
    batch = scheduler.plan()
    outputs = scheduler.apply(batch, engine.run(batch))
    scheduler.check_integrity()
    return outputs


def run_to_end(scheduler: Scheduler, engine: FakeEngine, max_ticks: int = 10_000) -> list[Output]:
    """Ticks until no job is left; `AssertionError` when that takes more than `max_ticks`."""
    outputs: list[Output] = []
    for _ in range(max_ticks):
        if not scheduler.has_work:
            return outputs
        outputs += run_tick(scheduler, engine)
    raise AssertionError(f"{scheduler!r} still has work after {max_ticks} ticks")


def next_letter(history: Sequence[int]) -> int:
    """A letter from a to z that depends on every token of the history and on its length."""
    return ord("a") + sum((at + 1) * token for at, token in enumerate(history, len(history))) % 26


class FakeEngine:
    """Runs batches without a model: the next token is a function of the history.

    Args:
        n_ctx: KV cells; `AssertionError` when a batch needs more, unless `reports_no_room`.
        n_batch: The most tokens of one batch.
        n_seq_max: Sequence ids are below `n_sequences`, which is one less where parts can be saved.
        n_ctx_train: The longest context that the model was trained on.
        next_token: What the fake model thinks most probable after a history.
        can_cut: See `FakeMemory`, as for `kv_unified`.
        kv_unified: False: each sequence has `n_ctx / n_seq_max` cells of its own.
        reports_no_room: A part that needs more cells than there are is reported as the engine reports it.
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
        """Tokens put into memory by batches, so those that were neither shared nor loaded."""
        self.batches: list[Batch] = []
        """All batches that were run."""
        self._next_token = next_token
        self._reports_no_room = reports_no_room
        self._failing: dict[str, JobRejected] = {}
        self._losing: dict[str, int] = {}
        self._refusals = 0

    @property
    def n_vocab(self) -> int:
        return self.vocab.n_tokens

    def run(self, batch: Batch) -> list[SlotResult]:
        """Put the batch's tokens into memory, and sample where a history is complete."""
        self._check(batch)
        self.batches.append(batch)
        if self._refusals and batch:
            self._refusals -= 1
            return [SlotResult(part.slot, part.slot.active.n_past, no_room=True) for part in batch.parts]
        return [self._run_part(part) for part in batch.parts]

    def close(self) -> None:
        """Forget all cells."""
        for seq_id in self.sequences.memory:
            self.sequences.remove(seq_id)

    # ---- what a test may have go wrong

    def fail_job(self, job_id: str, code: ErrorCode = ErrorCode.DECODE_FAILED, message: str = "told to fail") -> None:
        """From now on the job's results are this error."""
        self._failing[job_id] = JobRejected(code, message)

    def lose_cells(self, job_id: str, n_past: int = 0) -> None:
        """At the job's next turn all its cells from `n_past` on are lost."""
        self._losing[job_id] = n_past

    def refuse(self, n_batches: int = 1) -> None:
        """The next batches change nothing, as when llama.cpp finds no room."""
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
        self.sequences.append(run.seq_id, run.tokens[run.n_past : run.n_past + part.n_tokens])
        self.computed += part.n_tokens
        n_past = self.sequences.n_held(run.seq_id)
        if n_past < len(run.tokens):
            return SlotResult(slot, n_past)
        try:
            return SlotResult(slot, n_past, token=self._sample(run))
        except JobRejected as exc:
            return SlotResult(slot, n_past, error=exc)

    def _sample(self, run: Run) -> int:
        logits = np.zeros(self.n_vocab, np.float32)
        logits[self._next_token(tuple(run.tokens))] = 1
        return run.job.sampler.sample(logits, run.tokens, run.n_prompt)

    def _check(self, batch: Batch) -> None:
        """What llama.cpp needs, or silently gets wrong without."""
        if batch.n_tokens > self.n_batch:
            raise AssertionError(f"{batch.n_tokens} tokens in a batch of at most {self.n_batch}")
        runs = [part.slot.active for part in batch.parts]
        if len({run.seq_id for run in runs}) < len(runs):
            raise AssertionError(f"a sequence stands in the batch twice: {batch}")
        for part, run in zip(batch.parts, runs, strict=True):
            if self.sequences.tokens(run.seq_id) != run.tokens[: run.n_past]:
                raise AssertionError(f"sequence {run.seq_id} holds other tokens than {part.slot!r} thinks")
            expected = SlotState.DECODE if isinstance(part, DecodeToken) else SlotState.PREFILL
            if part.slot.state is not expected or not 1 <= part.n_tokens <= run.n_pending:
                raise AssertionError(f"{part!r} does not fit {part.slot!r}")
