"""The engine: computes batches with llama.cpp and samples the next tokens.

If one job fails, its result has an `error`, and the other jobs continue. When llama.cpp cannot decode a batch, every
sequence of the batch is cut back to its length before the batch. Then the parts are decoded one by one, so that only
the part that causes the failure fails. A recurrent sequence cannot be cut back. The engine empties such a sequence and
reports `n_past` 0, so the job is prefilled again. From then on the engine decodes this job in separate batches. If
the KV memory has no room for a part, even when the part is decoded by itself, the result has `no_room`. The part can be
decoded after other sequences have been removed.

Each token of a draft has a row of logits too. A row is sampled only if all tokens of the draft before it were sampled.
So each token is sampled as without a draft: from the same history, and from logits that differ as little as they do
with the shape of any batch. The cells of the other tokens of the draft remain until the scheduler removes them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.core.batch import Batch, DecodeToken, PrefillChunk, SampledToken, SlotResult
from llamaq.worker.core.finish_rules import ALL_NAN, NOT_NUMBERS
from llamaq.worker.core.job_parts import BEST, RowDraw
from llamaq.worker.core.slot import Run
from llamaq.worker.engine.backend_samplers import BackendSamplers, LargestLogits, Logits
from llamaq.worker.engine.kv_sequences import KvSequences
from llamaq.worker.engine.llama_bindings import NO_ROOM, SUCCESS, Context, Model
from llamaq.worker.engine.load_options import ContextOptions

log = logging.getLogger(__name__)

Part = DecodeToken | PrefillChunk
Row: TypeAlias = Logits | LargestLogits
"""All logits of a token, or the largest ones."""
LogitRows: TypeAlias = npt.NDArray[np.float32]
"""The logits of several tokens, shape (n_rows, n_vocab)."""


class RowDrawer(Protocol):
    """Draws the tokens of several rows in one call."""

    def draw(self, rows: LogitRows, draws: Sequence[RowDraw | None]) -> Sequence[int | None]:
        """Draw a token from each row as its `RowDraw` says. None: there is none, or no token can be drawn."""


class Engine:
    """One model with one context. Not thread-safe, except for `vocab`.

    Attributes:
        model: The model.
        context: The llama_context, with limits such as `n_ctx` and `n_batch`.
        sequences: Copies, cuts, saves and loads sequences between batches.
        vocab: The model's vocabulary, valid until `close`.

    Args:
        model: The model. `close` closes the model too.
        options: Options of the context.
        chat_template: Replaces the chat template of the model.
        row_drawer: Draws the tokens of several rows in less time than the samplers. None: the samplers draw them.

    Raises:
        EngineError: The context cannot be created.
    """

    def __init__(
        self,
        model: Model,
        options: ContextOptions,
        *,
        chat_template: str | None = None,
        row_drawer: RowDrawer | None = None,
    ) -> None:
        self.model = model
        self.context = Context(self.model, options)
        self.vocab = Vocab.of_model(self.model.pointer)
        if chat_template is not None:
            self.vocab.chat_template = chat_template
        self.sequences = KvSequences(self.model, self.context)
        self._row_drawer = row_drawer
        self._n_vocab = self.context.n_vocab
        self._backend_samplers = self._start_backend_samplers() if options.backend_sampling else None

    def run(self, batch: Batch) -> list[SlotResult]:
        """Decode a batch, and sample for each slot whose tokens are then all decoded.

        Returns:
            One result for each part of the batch, in any order.
        """
        results: list[SlotResult] = []
        together: list[Part] = []
        alone: list[Part] = []
        isolated = self.sequences.isolated
        for part in batch.parts:
            if isinstance(part, PrefillChunk) and (rejected := self._reject_bad_tokens(part)) is not None:
                results.append(rejected)
            elif isolated and isolated.get(_seq_id(part)) is part.slot.active:
                alone.append(part)
            else:
                together.append(part)
        if together:
            results += self._run_together(together)
        results += [self._run_alone(part) for part in alone]
        return results

    def warm_up(self) -> None:
        """Compute one token, so that the first batch finds the weights in memory and the kernels of a GPU loaded.

        Raises:
            EngineError: llama.cpp cannot compute it.
        """
        self.context.compute_first_token(self.vocab.bos or 0)

    def _start_backend_samplers(self) -> BackendSamplers | None:
        """Let the device find the largest logits of each row. None: it cannot."""
        samplers = BackendSamplers(self.context, self.sequences.n_sequences)
        self.warm_up()
        if samplers.works():
            return samplers
        log.warning("engine.no_backend_sampling: the device cannot find the largest logits; the CPU samples")
        samplers.remove_all()
        return None

    def close(self) -> None:
        """Free the context and the model. May be called twice."""
        if self._backend_samplers is not None:
            self._backend_samplers.remove_all()
            self._backend_samplers = None
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
            log.error("engine.decode_failed status=%d parts=%d: decoding them one by one", status, len(parts))
        return [self._run_alone(_without_tokens_ahead(part)) for part in parts]

    def _run_alone(self, part: Part) -> SlotResult:
        """Decode one part by itself. If its sequence lost cells in a failed batch, empty the sequence instead."""
        run = part.slot.active
        if not self.sequences.holds(run.seq_id, run.n_past):
            self.sequences.isolated[run.seq_id] = run
            return SlotResult(part.slot, n_past=self.sequences.cut(run.seq_id, 0))
        status = self._decode([part])
        if status == SUCCESS:
            return self._sample_all([part])[0]
        if status == NO_ROOM:
            if isinstance(part, DecodeToken) and part.forced:  # of an isolated sequence: the others have lost them
                return self._run_alone(_without_tokens_ahead(part))
            return SlotResult(part.slot, run.n_past, no_room=True)
        message = f"llama_decode failed with status {status} for {part.n_tokens} tokens at {run.n_past}"
        error = JobRejected(ErrorCode.DECODE_FAILED, message)
        log.error("engine.job_failed id=%s: %s", run.job.id, error)
        n_past = run.n_past if self.sequences.holds(run.seq_id, run.n_past) else 0
        return SlotResult(part.slot, n_past=n_past, error=error)

    def _decode(self, parts: Sequence[Part]) -> int:
        """Decode the parts. After a failure, cut each sequence to its previous length, or empty it if it cannot be cut.

        Returns:
            The status of llama_decode.
        """
        self._fill(parts)
        self.context.use_adapters(parts[0].slot.active.job.adapter_scales)  # all jobs of a batch have the same
        if (samplers := self._backend_samplers) is not None:
            for run in (part.slot.active for part in parts):
                samplers.prepare(run.seq_id, needs_all_logits=run.job.needs_all_logits)
        status = self.context.decode()
        if status == SUCCESS:
            if self.sequences.has_guards:
                for part in parts:
                    self.sequences.keep_cells(_seq_id(part), _n_past_after(part))
        elif status != NO_ROOM:
            for part in parts:
                self.sequences.cut(_seq_id(part), part.slot.active.n_past)
        return status

    def _fill(self, parts: Sequence[Part]) -> None:
        batch = self.context.batch
        batch.clear()
        decoding = [part.slot.active for part in parts if _is_single_token(part)]
        batch.add_decode_tokens(
            [run.tokens[run.n_past] for run in decoding],
            [run.n_past for run in decoding],
            [run.seq_id for run in decoding],
        )
        for part in parts:
            run = part.slot.active
            if isinstance(part, PrefillChunk):
                tokens = run.tokens[run.n_past : run.n_past + part.n_tokens]
                batch.add_chunk(tokens, run.n_past, run.seq_id, has_row=part.is_last, n_first_rows=part.n_scored)
            elif part.forced:
                batch.add_chunk((run.tokens[run.n_past], *part.forced), run.n_past, run.seq_id, has_row=True)
            elif part.draft.tokens:
                batch.add_draft((run.tokens[run.n_past], *part.draft.tokens), run.n_past, run.seq_id)

    def _sample_all(self, parts: Sequence[Part]) -> list[SlotResult]:
        # The logits have the order in which `_fill` adds the tokens: first the single tokens, then drafts and chunks.
        single = [part for part in parts if _is_single_token(part)]
        others = [part for part in parts if not _is_single_token(part)] if len(single) < len(parts) else []
        rows = self._rows(single, others)
        single_rows = rows[: len(single)]
        drawn = self._draw_rows(single, single_rows)
        results = [_sample_single(*one) for one in zip(single, single_rows, drawn, strict=True)]
        first = len(single)
        for part in others:
            n_rows = _n_rows(part)
            results.append(_sample_rows(part, rows[first : first + n_rows]))
            first += n_rows
        return results

    def _rows(self, single: Sequence[Part], others: Sequence[Part]) -> LogitRows | Sequence[Row]:
        """Return what the last decode computed for the rows of these parts, in the order of the batch."""
        n_rows = len(single) + sum(map(_n_rows, others))
        if not n_rows:
            return []
        if self._backend_samplers is None:
            return self.context.logits(n_rows)
        return self._backend_samplers.rows([_seq_id(part) for part in (*single, *others) for _ in range(_n_rows(part))])

    def _draw_rows(self, single: Sequence[Part], rows: LogitRows | Sequence[Row]) -> Sequence[int | None]:
        """Draw the tokens of parts without drafts that depend on the logits alone, in one call for all of them.

        Returns:
            The drawn token of each part, or the token with the largest logit, which its sampler needs. None: the
            sampler does without it.
        """
        if not isinstance(rows, np.ndarray) or not single:
            return [None] * len(single)
        runs = [part.slot.active for part in single]
        if self._row_drawer is not None:
            return self._row_drawer.draw(rows, [_row_draw(run) for run in runs])
        if any(run.job.sampler.checks_logits for run in runs):
            return [None] * len(single)
        best: list[int | None] = rows.argmax(axis=1).tolist()
        return best

    def _reject_bad_tokens(self, part: PrefillChunk) -> SlotResult | None:
        """Return the failure of a job whose prompt has a token that is not in the vocabulary. Sampled tokens are always
        in it.
        """
        run = part.slot.active
        tokens = run.tokens[run.n_past : run.n_past + part.n_tokens]
        if min(tokens) >= 0 and max(tokens) < self._n_vocab:
            return None
        bad = next(token for token in tokens if not 0 <= token < self._n_vocab)
        message = f"token {bad} is not in the vocabulary of {self._n_vocab} tokens"
        return SlotResult(part.slot, run.n_past, error=JobRejected(ErrorCode.INVALID_TOKEN, message))


def _row_draw(run: Run) -> RowDraw | None:
    """Return what to draw from the next row of a run."""
    sampler = run.job.sampler
    return sampler.row_draw(len(run.tokens) - run.n_prompt) if sampler.checks_logits else BEST


def _sample_single(part: Part, row: Row, drawn: int | None) -> SlotResult:
    """Sample the next token of a part without a draft. `drawn` is what `_draw_rows` has found."""
    run = part.slot.active
    try:
        return SlotResult(part.slot, run.n_past + 1, (_sample_token(run, row, drawn),))
    except JobRejected as exc:
        return SlotResult(part.slot, run.n_past + 1, error=exc)


def _sample_rows(part: Part, rows: LogitRows | Sequence[Row]) -> SlotResult:
    """Sample the next token of a part. As long as it equals the next token of the draft, sample one more.

    Forced tokens count as sampled. The token after them is sampled. The first rows of a chunk whose run scores the
    prompt give the probabilities of prompt tokens.
    """
    run = part.slot.active
    n_past, n_history = _n_past_after(part), len(run.tokens)
    draft, forced = (part.draft.tokens, part.forced) if isinstance(part, DecodeToken) else ((), ())
    sampled = [SampledToken(token) for token in forced]
    prompt_rows = b""
    try:
        if isinstance(part, PrefillChunk) and part.n_scored:
            prompt_rows, rows = _score(run, rows[: part.n_scored]), rows[part.n_scored :]
        run.tokens += forced
        for row, drafted in zip(rows, (*draft, None), strict=False):
            sampled.append(_sample_token(run, row))
            if sampled[-1].token != drafted:
                break
            run.tokens.append(sampled[-1].token)
    except JobRejected as exc:
        return SlotResult(part.slot, n_past, tuple(sampled), error=exc)
    finally:
        del run.tokens[n_history:]  # only the scheduler appends tokens
    return SlotResult(part.slot, n_past, tuple(sampled), prompt_rows=prompt_rows)


def _score(run: Run, rows: LogitRows | Sequence[Row]) -> bytes:
    """Return the probabilities of the prompt tokens that follow the tokens of these rows.

    Raises:
        JobRejected: A logit is not a number.
    """
    if run.job.prompt_scorer is None or not isinstance(rows, np.ndarray):
        raise TypeError(f"{run.job!r} has no rows of all logits, or needs none")
    _check_not_nan(rows[-1])  # the later tokens depend on the earlier ones
    start = run.n_past + 1
    return run.job.prompt_scorer.score(rows, run.tokens[start : start + len(rows)])


def _sample_token(run: Run, row: Row, drawn: int | None = None) -> SampledToken:
    """Sample the token that follows the history. `drawn` is what `_draw_rows` has found.

    Raises:
        JobRejected: No token can be sampled.
    """
    sampler = run.job.sampler
    try:
        token = _draw(run, row, drawn)
    except JobRejected as exc:
        if exc.code is ErrorCode.DECODE_FAILED:
            log.error("engine.logits_not_numbers id=%s n_tokens=%d", run.job.id, len(run.tokens))
        raise
    except Exception as exc:  # an error in one sampler must not end other jobs
        log.exception("engine.sampler_failed id=%s", run.job.id)
        raise JobRejected(ErrorCode.INTERNAL, f"sampling failed: {exc!r}") from exc
    return SampledToken(token, sampler.logprobs, sampler.draw_probability)


def _draw(run: Run, row: Row, drawn: int | None) -> int:
    """Draw the next token of a run. `drawn` is what `_draw_rows` has found.

    Raises:
        JobRejected: No token can be drawn.
    """
    _check_not_nan(row)
    sampler = run.job.sampler
    if isinstance(row, LargestLogits):
        return sampler.sample_largest(row.tokens, row.logits, run.tokens, run.n_prompt)
    if not sampler.checks_logits:
        if drawn is None:
            drawn = int(row.argmax())
        if not math.isfinite(row.item(drawn)):  # NaN if any logit is NaN
            raise JobRejected(ErrorCode.DECODE_FAILED, NOT_NUMBERS)
    return sampler.sample(row, run.tokens, run.n_prompt, drawn)


def _check_not_nan(row: Row) -> None:
    """Raise `JobRejected` if all logits are NaN. A NaN in an earlier layer makes them all NaN, so one is enough.

    The options of the job change the logits only later, and may make some of them NaN or infinite.
    """
    logits = row.logits if isinstance(row, LargestLogits) else row
    if math.isnan(logits.item(0)):
        raise JobRejected(ErrorCode.DECODE_FAILED, ALL_NAN)


def _seq_id(part: Part) -> int:
    return part.slot.active.seq_id


def _is_single_token(part: Part) -> bool:
    return isinstance(part, DecodeToken) and part.n_tokens == 1


def _n_rows(part: Part) -> int:
    """Return the number of rows of logits that belong to a part."""
    if isinstance(part, DecodeToken):
        return 1 + len(part.draft)
    return part.n_scored + part.is_last


def _without_tokens_ahead(part: Part) -> Part:
    """Return the part without its draft and its forced tokens."""
    return DecodeToken(part.slot) if isinstance(part, DecodeToken) else part


def _n_past_after(part: Part) -> int:
    return part.slot.active.n_past + part.n_tokens
