"""Repeats a tick: the next tick computes the next tokens of the same streams, without a new plan.

Most ticks compute decode tokens only, for the same jobs as the tick before. Then the next batch is known as soon as the
tokens are sampled. The histories and the KV cells are recorded at once, because the next batch needs them. The texts of
the tokens and the masks of grammars are made later, by another thread, while the next batch is computed.

A tick is not repeated if a job ends, or if something else may have to be done before the next batch: a prompt to
compute, a waiting job that may preempt another one, cells to evict or to move, forced tokens, a deadline.

Forced tokens end the repetition only if the forced tokens of all streams together gain time (`ForcedTokenGain`). On a
GPU, most do not: a change of the batch size, and the change back, take longer than the saved ticks. Then each forced
token is drawn in a repeated tick, as the only token that its mask allows.

The texts are searched for drafts, and these are added to the batch. The longer no draft was found, the less often the
texts are searched. A draft model needs a plan for each search.

If a job ends by its text, such as a stop string, this is found when the text is made. The next tick has then begun. It
computes the KV cell of the job's last token. The tokens that it samples for the job are not used.

With an accepted draft, a stream gets several tokens in one tick. In two cases a plan then follows. If the text may end
the job, it may end before the last of these tokens. If the job has a grammar, the grammar may force tokens after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from llamaq.common.errors import EngineError
from llamaq.worker.core.batch import Batch, SlotResult
from llamaq.worker.core.draft_plan import NO_DRAFT_PLAN
from llamaq.worker.core.finish_rules import is_end
from llamaq.worker.core.outputs import NewToken, TickOutcome
from llamaq.worker.core.slot import Run, Slot
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.scheduling.preemption import CELLS_AHEAD, Preemption
from llamaq.worker.scheduling.strategies.guarded_strategy import GuardedStrategy
from llamaq.worker.scheduling.token_outputs import new_token
from llamaq.worker.scheduling.tokens_ahead.tokens_ahead import TokensAhead
from llamaq.worker.scheduling.waiting_queue import WaitingQueue


@dataclass(slots=True, eq=False)
class _Repetition:
    """The batches between two plans."""

    batch: Batch
    """The last batch."""
    without_drafts: Batch
    """The last batch without its drafts."""
    n_left: int
    """How many tokens each job can get before the next plan."""
    until_s: float
    """When the first deadline of a job is reached."""
    n_unsearched: int
    """Number of ticks before the next search for drafts. If only a plan may search, `n_left` is at most this number."""
    has_room_for_forced: bool
    """Whether the next plan may add forced tokens to the batch."""


class RepeatedTicks:
    """Decides how often a tick is repeated, and records the tokens of the repeated ticks.

    A worker makes these calls between `Scheduler.plan` and `Scheduler.apply`:

        results = engine.run(batch)
        while (following := repeater.next_batch(results)) is not None:
            batch, results = following, engine.run(following)

    `late_outputs` returns the outputs of each tick that had a next batch. Call it for all of these ticks, in their
    order, before `apply`. If `texts_may_end`, call `late_outputs` before each `next_batch`. If `has_stopped` is then
    true, call `apply`.

    Threads: another thread may call `late_outputs`, and what `preparation` returns, even while the engine thread calls
    `next_batch` for later ticks. The engine thread calls all other methods.

    Args:
        memory: The slots and the KV memory.
        waiting: The jobs without a slot.
        strategy: Plans the batches.
        preemption: Preempts running jobs.
        tokens_ahead: Adds forced tokens and drafts to the batches.
        end_tokens: The model's end-of-generation tokens.
        on_tick: `late_outputs` calls it with the batch of each tick and the time of its end.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        memory: KvMemory,
        waiting: WaitingQueue,
        strategy: GuardedStrategy,
        preemption: Preemption,
        tokens_ahead: TokensAhead,
        *,
        end_tokens: frozenset[int],
        on_tick: Callable[[Batch, float], None],
        clock: Callable[[], float],
    ) -> None:
        self._memory = memory
        self._waiting = waiting
        self._strategy = strategy
        self._preemption = preemption
        self._tokens_ahead = tokens_ahead
        self._end_tokens = end_tokens
        self._on_tick = on_tick
        self._clock = clock
        self._repetition: _Repetition | None = None
        """The repetition of the last plan. None: its tick is not repeated."""
        self.texts_may_end = False
        """During a repetition: whether the text of a token may end a job of the batch."""
        self.can_prepare = False
        """During a repetition: whether `preparation` returns a call."""
        self._stopped: set[Slot] = set()

    # ---- the decision, made with the plan

    def forbid(self) -> None:
        """Let no tick be repeated before the next `begin_if_possible`."""
        self._repetition = None

    def begin_if_possible(self, batch: Batch, now_s: float) -> None:
        """Let the tick of a batch be repeated, if the next plan would be the same apart from its drafts.

        Args:
            batch: The batch.
            now_s: The time.
        """
        if not self._would_be_planned_again(batch):
            return
        runs = [part.slot.active for part in batch.decode]
        n_unsearched = self._tokens_ahead.n_unsearched(runs)
        n_to_end = min([run.max_length - len(run.tokens) for run in runs]) - 1
        n_left = min(n_to_end, self._memory.n_tokens_with_room(CELLS_AHEAD))
        if self._tokens_ahead.needs_plan:
            n_left = min(n_left, n_unsearched)  # without drafts, each stream gets one token in a tick
        self.texts_may_end = any(run.job.detokenizer.may_end for run in runs)
        self.can_prepare = any(run.job.sampler.can_prepare for run in runs)
        self._repetition = _Repetition(
            batch,
            batch.without_drafts(),
            n_left=n_left,
            until_s=self._first_deadline_s(runs, now_s),
            n_unsearched=n_unsearched,
            has_room_for_forced=self.can_prepare and batch.n_tokens < self._strategy.limits.budget,
        )

    def _would_be_planned_again(self, batch: Batch) -> bool:
        """Whether the next plan would be the same apart from its drafts, if no job ends and there is no new job."""
        return (
            len(batch.decode) == len(self._memory.active_slots)
            and self._strategy.decodes_all
            and not self._memory.has_transfers
            and not self._preemption.may_preempt
            and batch.draft_plan is NO_DRAFT_PLAN
            and not batch.n_forced
            and not (batch.n_drafts and self._tokens_ahead.needs_plan)
        )

    def _first_deadline_s(self, runs: Iterable[Run], now_s: float) -> float:
        """Return the earliest time at which a job must end, or from which a job may end at a line break.

        `timeout_s` bounds the time in a slot, so it ends no waiting job.
        """
        limits = [run.job.times.ends_s(now_s, run.job.request.timeout_s) for run in runs]
        limits += [run.job.generated_until_s for run in runs]
        return min(limits + [job.times.ends_s(now_s, None) for job in self._waiting])

    # ---- the repeated ticks

    def next_batch(self, results: Sequence[SlotResult]) -> Batch | None:
        """Record the sampled tokens, and return the batch of the next tick.

        Args:
            results: The results of the last batch.

        Returns:
            None: the next tick needs a plan. Then nothing has changed.

        Raises:
            EngineError: Draft tokens that were not accepted could not be removed.
        """
        repetition = self._repetition
        if repetition is None or repetition.n_left <= 0 or self._clock() >= repetition.until_s:
            return None
        if not all(self._continues(result) for result in results):
            return None
        n_tokens = max([len(result.sampled) for result in results])
        if n_tokens > repetition.n_left:
            return None
        if repetition.has_room_for_forced and self._tokens_ahead.forces_after([one.slot.active for one in results]):
            return None
        repetition.n_left -= n_tokens
        self._record(results, repetition)
        repetition.batch = self._next_batch(repetition)
        return repetition.batch

    def _continues(self, result: SlotResult) -> bool:
        """Whether the stream has got tokens, and none of them is its last one."""
        slot, n_past, sampled, error, _, _ = result
        run, n_sampled = slot.active, len(sampled)
        has_cells = n_past >= len(run.tokens) + n_sampled - 1
        if error is not None or not n_sampled or not has_cells:
            return False
        if is_end(run.job, sampled[-1].token, self._end_tokens):
            return False
        return n_sampled == 1 or not (run.job.detokenizer.may_end or run.job.sampler.can_prepare)

    def _record(self, results: Iterable[SlotResult], repetition: _Repetition) -> None:
        """Record the sampled tokens and the cells of the streams, and the outcomes of the drafts."""
        for slot, n_past, sampled, _, _, _ in results:
            slot.active.tokens += [one.token for one in sampled]
            self._memory.record_progress(slot, n_past)
        if repetition.batch is repetition.without_drafts:
            return
        drafts = {part.slot: part.draft for part in repetition.batch.decode}
        for result in results:
            n_accepted = len(result.sampled) - 1
            n_before = len(result.slot.active.tokens) - len(result.sampled)
            self._tokens_ahead.end_tick(result, drafts[result.slot], n_before, n_accepted)
            if result.slot.active.n_pending > 1:
                raise EngineError(f"llama.cpp could not remove the draft tokens of {result.slot!r}")

    def _next_batch(self, repetition: _Repetition) -> Batch:
        """Return the next batch. It has drafts, if it is time to search for them and one is found."""
        if repetition.n_unsearched:
            repetition.n_unsearched -= 1
            return repetition.without_drafts
        batch = self._tokens_ahead.add_drafts(repetition.without_drafts)
        repetition.n_unsearched = self._tokens_ahead.n_unsearched([part.slot.active for part in batch.decode])
        return batch

    def late_outputs(self, batch: Batch, results: Iterable[SlotResult], ended_s: float) -> TickOutcome:
        """Return the outcome of a tick that had a next batch. The texts of its tokens are made now.

        Args:
            batch: The batch.
            results: Its results.
            ended_s: When the engine ended.
        """
        outputs: list[NewToken] = []
        for slot, _, sampled, _, _, _ in results:
            job = slot.active.job
            outputs += [new_token(job, one, ended_s) for one in sampled]
            if job.detokenizer.has_ended:
                self._stopped.add(slot)
        self._on_tick(batch, ended_s)
        return TickOutcome(outputs, len(outputs) - batch.n_decode)  # without its draft, each stream gets one token

    def preparation(self, batch: Batch) -> Callable[[], None] | None:
        """Return a call that computes what the next draws need besides the logits. None: they need nothing.

        Another thread makes the call while the engine computes the batch, or later.
        """
        draws = [
            partial(run.job.sampler.prepare, run.tokens, run.n_prompt, len(run.tokens), part.draft.tokens)
            for part in batch.decode
            if (run := part.slot.active).job.sampler.can_prepare
        ]
        return partial(_call_all, draws) if draws else None

    @property
    def has_stopped(self) -> bool:
        """Whether a job has ended by its text, and still has its slot."""
        return bool(self._stopped)

    def take_stopped(self) -> set[Slot]:
        """Return the slots whose jobs have ended by their texts since the last call."""
        stopped, self._stopped = self._stopped, set()
        return stopped


def _call_all(calls: Iterable[Callable[[], None]]) -> None:
    for call in calls:
        call()
