"""The engine: runs a batch through llama.cpp and samples, and copies and removes sequences.

A fault of one job becomes that job's `error`. When llama.cpp cannot decode a batch, every sequence of it is put back
to where it was, and the parts are run one by one, so that the one at fault fails alone. A recurrent sequence cannot be
put back: it is emptied, its slot reported with `n_past` 0 so that it is prefilled again, and from then on it is
decoded apart from the others. A part for which KV memory has no room by itself is reported as such, and may be run
again when others have left.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.vocab.vocab import Vocab
from llamaq.worker.core.batch import Batch, DecodeToken, PrefillChunk, SlotResult
from llamaq.worker.core.kv_data import Allocate, Data, nothing_ready
from llamaq.worker.engine.kv_sequences import KvSequences
from llamaq.worker.engine.llama_bindings import NO_ROOM, SUCCESS, Context, ContextOptions, Model

logger = logging.getLogger(__name__)

Part = DecodeToken | PrefillChunk


class Engine:
    """One model and one context. Not thread-safe, except for `vocab`."""

    def __init__(self, model: Model, options: ContextOptions) -> None:
        """Make a context for the model, which belongs to the engine from now on. Raises `EngineError`."""
        self.model = model
        self.context = Context(self.model, options)
        self.vocab = Vocab.of_model(self.model.pointer)
        self.n_ctx = self.context.n_ctx
        self.n_batch = self.context.n_batch
        self.n_seq_max = self.context.n_seq_max
        self.n_ctx_train = self.model.n_ctx_train
        self.n_vocab = self.context.n_vocab
        self._sequences = KvSequences(self.model, self.context)
        self._apart: set[int] = set()
        """Sequences that were in a failed batch and could not be put back."""

    def run(self, batch: Batch) -> list[SlotResult]:
        """Decode a batch and sample where a slot's history is complete; one result for each part, in no set order."""
        rejected = [result for part in batch.parts if (result := self._reject_bad_tokens(part))]
        bad = {result.slot.index for result in rejected}
        apart = [part for part in batch.parts if part.slot.index not in bad and _seq_id(part) in self._apart]
        together = [part for part in batch.parts if part.slot.index not in bad and _seq_id(part) not in self._apart]
        results = rejected
        if together:
            results += self._run_together(together)
        for part in apart:
            results.append(self._run_alone(part))
        return results

    @property
    def can_cut(self) -> bool:
        """Whether a sequence can be used at less than its length."""
        return self._sequences.can_cut

    @property
    def in_blocks(self) -> bool:
        """Whether parts of a sequence can be saved and loaded; otherwise only all of it."""
        return self._sequences.in_blocks

    @property
    def kv_unified(self) -> bool:
        """Whether sequences share one pool of cells, and copies their cells."""
        return self.context.kv_unified

    @property
    def cells_per_sequence(self) -> int:
        """The most cells that one sequence can have."""
        return self.context.cells_per_sequence

    @property
    def n_sequences(self) -> int:
        """Sequence ids below this are for others; what is above, the engine needs itself."""
        return self._sequences.n_sequences

    def remove(self, seq_id: int) -> None:
        """Forget a sequence's cells; removing an empty one is allowed."""
        self._apart.discard(seq_id)
        self._sequences.cut(seq_id, 0)

    def copy(self, source: int, target: int, n_tokens: int) -> int:
        """Give the empty sequence `target` the first `n_tokens` cells of `source`; `KvSequences.copy` says more."""
        return self._sequences.copy(source, target, n_tokens)

    def cut(self, seq_id: int, n_tokens: int) -> int:
        """Keep the first `n_tokens` cells of a sequence; returns how many it holds then, 0 where it cannot be cut."""
        return self._sequences.cut(seq_id, n_tokens)

    def save(self, seq_id: int, start: int, end: int, allocate: Allocate = nothing_ready) -> Data:
        """The cells [start, end) of a sequence. Raises `EngineError`; `KvSequences.save` says more."""
        return self._sequences.save(seq_id, start, end, allocate)

    def load(self, seq_id: int, start: int, end: int, data: Data, first: int) -> bool:
        """Append the cells [start, end) of what was saved from `first` on; `KvSequences.load` says more."""
        return self._sequences.load(seq_id, start, end, data, first)

    def close(self) -> None:
        """Free context and model; may be called twice."""
        self.context.close()
        self.model.close()

    def __repr__(self) -> str:
        return f"<Engine {self.model.description!r} n_ctx={self.n_ctx} n_batch={self.n_batch} seqs={self.n_seq_max}>"

    def _run_together(self, parts: Sequence[Part]) -> list[SlotResult]:
        status = self._decode(parts)
        if status == SUCCESS:
            return self._sample_all(parts)
        if status != NO_ROOM:
            logger.error("engine.decode_failed status=%d parts=%d: running them one by one", status, len(parts))
        return [self._run_alone(part) for part in parts]

    def _run_alone(self, part: Part) -> SlotResult:
        """Decode one part by itself, or report that its cells were lost before."""
        run = part.slot.active
        if not self._sequences.holds(run.seq_id, run.n_past):
            self._apart.add(run.seq_id)
            return SlotResult(part.slot, n_past=self.cut(run.seq_id, 0))
        status = self._decode([part])
        if status == SUCCESS:
            return self._sample_all([part])[0]
        if status == NO_ROOM:
            return SlotResult(part.slot, run.n_past, no_room=True)
        why = f"{part.n_tokens} tokens at {run.n_past} failed alone: llama_decode returned {status}"
        error = JobRejected(ErrorCode.DECODE_FAILED, why)
        logger.error("engine.job_failed id=%s: %s", run.job.id, error)
        n_past = run.n_past if self._sequences.holds(run.seq_id, run.n_past) else 0
        return SlotResult(part.slot, n_past=n_past, error=error)

    def _decode(self, parts: Sequence[Part]) -> int:
        """Fill the batch and decode it; after a failure, sequences are where they were, or empty."""
        self._fill(parts)
        status = self.context.decode()
        if status not in (SUCCESS, NO_ROOM):
            for part in parts:
                self.cut(_seq_id(part), part.slot.active.n_past)
        return status

    def _fill(self, parts: Sequence[Part]) -> None:
        batch = self.context.batch
        batch.clear()
        singles = [part.slot.active for part in parts if isinstance(part, DecodeToken)]
        batch.add_singles(
            [run.tokens[run.n_past] for run in singles],
            [run.n_past for run in singles],
            [run.seq_id for run in singles],
        )
        for part in parts:
            if isinstance(part, PrefillChunk):
                run = part.slot.active
                tokens = run.tokens[run.n_past : run.n_past + part.n_tokens]
                batch.add_run(tokens, run.n_past, run.seq_id, wants_logits=part.is_last)

    def _sample_all(self, parts: Sequence[Part]) -> list[SlotResult]:
        # The batch has decode tokens first, then the chunks; its logits come in the same order.
        ordered = [part for part in parts if isinstance(part, DecodeToken)]
        ordered += [part for part in parts if isinstance(part, PrefillChunk)]  # type: ignore[misc]
        n_rows = sum(_ends_history(part) for part in ordered)
        rows = iter(self.context.logits(n_rows) if n_rows else ())
        return [
            self._sample(part, next(rows)) if _ends_history(part) else SlotResult(part.slot, _n_past_after(part))
            for part in ordered
        ]

    def _sample(self, part: Part, logits: Any) -> SlotResult:
        run = part.slot.active
        n_past = _n_past_after(part)
        try:
            token = run.job.sampler.sample(logits, run.tokens, run.n_prompt)
        except JobRejected as exc:
            return SlotResult(part.slot, n_past, error=exc)
        except Exception as exc:  # a defect of one sampler must not end the others' jobs
            logger.exception("engine.sampler_failed id=%s", run.job.id)
            return SlotResult(part.slot, n_past, error=JobRejected(ErrorCode.INTERNAL, f"sampling failed: {exc!r}"))
        return SlotResult(part.slot, n_past, token=token)

    def _reject_bad_tokens(self, part: Part) -> SlotResult | None:
        run = part.slot.active
        tokens = run.tokens[run.n_past : run.n_past + part.n_tokens]
        if min(tokens) >= 0 and max(tokens) < self.n_vocab:
            return None
        bad = next(token for token in tokens if not 0 <= token < self.n_vocab)
        message = f"token {bad} is not in the vocabulary of {self.n_vocab}"
        return SlotResult(part.slot, run.n_past, error=JobRejected(ErrorCode.INVALID_TOKEN, message))


def _seq_id(part: Part) -> int:
    return part.slot.active.seq_id


def _ends_history(part: Part) -> bool:
    return isinstance(part, DecodeToken) or part.is_last


def _n_past_after(part: Part) -> int:
    return part.slot.active.n_past + part.n_tokens
