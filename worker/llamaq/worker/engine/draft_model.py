"""The draft model: a small model that drafts the next tokens of all slots together.

Each slot has one sequence, whose id is the slot's index. The scheduler plans what is computed (`DraftSequences`). A
draft takes the most probable token of each step. What the draft model computes changes no output: the engine verifies
every draft. Therefore its failure fails no job. After a failure it drafts nothing more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from llamaq.common.errors import EngineError
from llamaq.worker.core.batch import Batch
from llamaq.worker.core.draft import NO_DRAFT, Draft
from llamaq.worker.core.draft_plan import DraftPart, DraftPlan, DraftWork
from llamaq.worker.core.finish_rules import is_end
from llamaq.worker.core.slot import Slot
from llamaq.worker.engine.kv_sequences import KvSequences
from llamaq.worker.engine.llama_bindings import SUCCESS, Context, Model
from llamaq.worker.engine.load_options import ContextOptions

log = logging.getLogger(__name__)

MEASURED_TOKENS, MEASURED_STEPS = 16, 3
"""Number of tokens and of steps that `measure` computes. A smaller batch limits the number of tokens."""


class DraftModel:
    """A draft model with its context. Not thread-safe.

    Attributes:
        model: The draft model.
        context: Its llama_context.
        sequences: The sequences of the context, one for each slot.

    Args:
        model: The draft model. `close` closes the model too.
        options: Options of the context.
        n_vocab: Number of tokens of the vocabulary of the model that verifies the drafts.
        end_tokens: The end-of-generation tokens of that model. A draft ends before such a token.
        p_min: A draft ends before a token that is less probable. 0: it never does.
        clock: Returns the time in seconds. Must be monotonic.

    Raises:
        EngineError: The context cannot be created.
    """

    def __init__(
        self,
        model: Model,
        options: ContextOptions,
        *,
        n_vocab: int,
        end_tokens: frozenset[int],
        p_min: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.context = Context(model, options)
        self.sequences = KvSequences(model, self.context)
        self._n_vocab = n_vocab
        self._end_tokens = end_tokens
        self._p_min = p_min
        self._clock = clock
        self._has_failed = False

    def measure(self, n_drafts: int) -> DraftWork:
        """Compute short drafts, and return how long that took. The first computation also loads the weights.

        Args:
            n_drafts: Number of drafts, at most the number of slots.

        Raises:
            EngineError: llama.cpp cannot compute it.
        """
        n_tokens = min(MEASURED_TOKENS, self.context.n_batch)
        started_s = self._clock()
        batch = self.context.batch
        batch.clear()
        batch.add_chunk([0] * n_tokens, 0, 0, has_row=False)
        self._decode([])
        self.context.synchronize()
        steps_started_s = self._clock()
        for place in range(MEASURED_STEPS):
            batch.clear()
            positions = [n_tokens + place, *[place] * (n_drafts - 1)]
            batch.add_decode_tokens([0] * n_drafts, positions, range(n_drafts))
            self._decode([])
            self._best_tokens(n_drafts)
        before_steps_s, steps_s = steps_started_s - started_s, self._clock() - steps_started_s
        for seq_id in range(n_drafts):
            self.sequences.cut(seq_id, 0)
        return DraftWork(n_tokens, before_steps_s, MEASURED_STEPS, n_drafts * MEASURED_STEPS, steps_s)

    def add_drafts(self, batch: Batch) -> Batch:
        """Execute the draft plan of a batch, and return the batch with the drafts and a report of the work."""
        plan = batch.draft_plan
        if not plan:
            return batch
        if self._has_failed:
            return replace(batch, draft_work=DraftWork(has_failed=True))
        try:
            drafts, work = self._execute(plan)
        except EngineError as exc:
            self._stop(exc)
            return replace(batch, draft_work=DraftWork(has_failed=True))
        decode = tuple(part._replace(draft=drafts.get(part.slot, NO_DRAFT)) for part in batch.decode)
        return replace(batch, decode=decode, draft_work=work)

    def close(self) -> None:
        """Free the context and the model. May be called twice."""
        self.context.close()
        self.model.close()

    def _execute(self, plan: DraftPlan) -> tuple[dict[Slot, Draft], DraftWork]:
        """Return the drafts and a report of the work.

        Raises:
            EngineError: llama.cpp cannot compute a batch.
        """
        started_s = self._clock()
        for index in plan.emptied:
            self.sequences.remove(index)
        parts = [part for part in plan.parts if self.sequences.cut(part.slot.index, part.n_kept) == part.n_kept]
        n_before_steps = self._compute_missing(parts)
        steps_started_s = self._clock()
        drafts, n_steps, n_step_drafts = self._draft([part for part in parts if part.n_tokens])
        lost = {part.slot.index for part in plan.parts} - {part.slot.index for part in parts}
        work = DraftWork(
            n_before_steps,
            steps_started_s - started_s if n_before_steps else 0.0,
            n_steps,
            n_step_drafts,
            self._clock() - (steps_started_s if n_before_steps else started_s),
            frozenset(lost),
        )
        return drafts, work

    def _compute_missing(self, parts: Sequence[DraftPart]) -> int:
        """Compute the missing tokens that do not belong to the first step. Returns their number."""
        batch = self.context.batch
        batch.clear()
        for part in parts:
            if n_tokens := part.n_before_steps:
                tokens = part.slot.active.tokens[part.n_kept : part.n_kept + n_tokens]
                batch.add_chunk(tokens, part.n_kept, part.slot.index, has_row=False)
        n_tokens = len(batch)
        if n_tokens:
            self._decode([(part.slot.index, part.n_kept + part.n_before_steps) for part in parts])
            self.context.synchronize()  # otherwise the first step would seem to take this time
        return n_tokens

    def _draft(self, parts: Sequence[DraftPart]) -> tuple[dict[Slot, Draft], int, int]:
        """Return the draft of each part, the number of steps, and the number of drafts of all steps together."""
        tokens: dict[Slot, list[int]] = {part.slot: [] for part in parts}
        stopped_early: set[Slot] = set()
        n_steps, n_step_drafts, growing = 0, 0, list(parts)
        while growing:
            self._fill_step(growing, tokens)
            self._decode([(part.slot.index, part.n_past + len(tokens[part.slot])) for part in growing])
            n_steps += 1
            n_step_drafts += len(growing)
            for part, (token, is_probable) in zip(growing, self._best_tokens(len(growing)), strict=True):
                if not is_probable:
                    stopped_early.add(part.slot)
                elif not is_end(part.slot.active.job, token, self._end_tokens):
                    tokens[part.slot].append(token)
            growing = [part for part in growing if n_steps == len(tokens[part.slot]) < part.n_tokens]
        drafts = {slot: Draft(tuple(draft), stopped_early=slot in stopped_early) for slot, draft in tokens.items()}
        return drafts, n_steps, n_step_drafts

    def _fill_step(self, parts: Sequence[DraftPart], tokens: dict[Slot, list[int]]) -> None:
        """Fill the batch with the last token of each draft, or with the last missing tokens before its first token."""
        batch = self.context.batch
        batch.clear()
        for part in parts:
            run, drafted = part.slot.active, tokens[part.slot]
            start = part.n_past + len(drafted) - 1 if drafted else part.n_kept + part.n_before_steps
            step = drafted[-1:] or run.tokens[start : part.n_past]
            batch.add_chunk(step, start, part.slot.index, has_row=True)

    def _best_tokens(self, n_rows: int) -> list[tuple[int, bool]]:
        """Return the most probable token of each row of the last step, and whether it is probable enough."""
        rows = self.context.logits(n_rows)
        best = rows.argmax(axis=1)
        is_probable = best < self._n_vocab
        if self._p_min:
            largest = rows[np.arange(n_rows), best]
            with np.errstate(invalid="ignore", over="ignore"):  # damaged weights give logits that are not numbers
                is_probable &= 1 / np.exp(rows - largest[:, None]).sum(axis=1) >= self._p_min
        return list(zip(best.tolist(), is_probable.tolist(), strict=True))

    def _decode(self, lengths: Sequence[tuple[int, int]]) -> None:
        """Compute the batch. Afterwards, each sequence of `lengths` has the given number of tokens.

        Raises:
            EngineError: llama.cpp cannot compute the batch.
        """
        status = self.context.decode()
        if status != SUCCESS:
            raise EngineError(f"llama_decode returned {status} for {len(self.context.batch)} tokens of drafts")
        for seq_id, n_tokens in lengths:
            self.sequences.keep_cells(seq_id, n_tokens)

    def _stop(self, exc: EngineError) -> None:
        """Draft nothing from now on."""
        self._has_failed = True
        self.context.clear()
        log.error("draft_model.failed: %s; this worker continues without drafts until it is restarted", exc)

    def __repr__(self) -> str:
        return f"<DraftModel {self.model.description!r} n_ctx={self.context.n_ctx} seqs={self.context.n_seq_max}>"
