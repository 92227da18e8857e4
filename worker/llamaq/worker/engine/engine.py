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
        self.sequences = KvSequences(self.model, self.context)
        self._n_vocab = self.context.n_vocab

    def run(self, batch: Batch) -> list[SlotResult]:
        """Decode a batch and sample where a slot's history is complete; one result for each part, in no set order."""
        results: list[SlotResult] = []
        together: list[Part] = []
        alone: list[Part] = []
        isolated = self.sequences.isolated
        for part in batch.parts:
            if (rejected := self._reject_bad_tokens(part)) is not None:
                results.append(rejected)
            elif _seq_id(part) in isolated:
                alone.append(part)
            else:
                together.append(part)
        if together:
            results += self._run_together(together)
        results += [self._run_alone(part) for part in alone]
        return results

    def close(self) -> None:
        """Free context and model; may be called twice."""
        self.context.close()
        self.model.close()

    def __repr__(self) -> str:
        context = self.context
        limits = f"n_ctx={context.n_ctx} n_batch={context.n_batch} seqs={context.n_seq_max}"
        return f"<Engine {self.model.description!r} {limits}>"

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
        if not self.sequences.holds(run.seq_id, run.n_past):
            self.sequences.isolated.add(run.seq_id)
            return SlotResult(part.slot, n_past=self.sequences.cut(run.seq_id, 0))
        status = self._decode([part])
        if status == SUCCESS:
            return self._sample_all([part])[0]
        if status == NO_ROOM:
            return SlotResult(part.slot, run.n_past, no_room=True)
        why = f"{part.n_tokens} tokens at {run.n_past} failed alone: llama_decode returned {status}"
        error = JobRejected(ErrorCode.DECODE_FAILED, why)
        logger.error("engine.job_failed id=%s: %s", run.job.id, error)
        n_past = run.n_past if self.sequences.holds(run.seq_id, run.n_past) else 0
        return SlotResult(part.slot, n_past=n_past, error=error)

    def _decode(self, parts: Sequence[Part]) -> int:
        """Fill the batch and decode it; after a failure, sequences are where they were, or empty."""
        self._fill(parts)
        status = self.context.decode()
        if status not in (SUCCESS, NO_ROOM):
            for part in parts:
                self.sequences.cut(_seq_id(part), part.slot.active.n_past)
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
        if min(tokens) >= 0 and max(tokens) < self._n_vocab:
            return None
        bad = next(token for token in tokens if not 0 <= token < self._n_vocab)
        message = f"token {bad} is not in the vocabulary of {self._n_vocab}"
        return SlotResult(part.slot, run.n_past, error=JobRejected(ErrorCode.INVALID_TOKEN, message))


def _seq_id(part: Part) -> int:
    return part.slot.active.seq_id


def _ends_history(part: Part) -> bool:
    return isinstance(part, DecodeToken) or part.is_last


def _n_past_after(part: Part) -> int:
    return part.slot.active.n_past + part.n_tokens
