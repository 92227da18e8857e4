"""The scheduler decides which job runs in which slot, what a tick computes, and when a job is finished.

The scheduler only decides. The engine computes. One tick of a worker consists of these calls:

    scheduler.expire()
    scheduler.admit()
    outputs = scheduler.take_outputs()  # or they are part of the outcome
    scheduler.move(budget_s)
    batch = scheduler.plan(queue_depth)
    results = engine.run(batch)
    outcome = scheduler.apply(batch, results)

All calls must come from one thread, and no other method may be called between `plan` and `apply`. `take_outputs` and
`apply` return the outputs of each job in order. For each run of a job these are a `SlotAcquired`, a `PromptAdvanced`
before the first chunk and after each, and a `PromptScored`, if the job asks for them, the tokens of the run, and a
`SlotLost` if the job is preempted. The last output of a job is its `JobEnded`. Every job that `submit` accepts leaves
the scheduler in one of two ways: exactly one `JobEnded` is returned for the job, or the job is removed without a
`JobEnded`, by `release` or one of the methods `withdraw_...`.

Between `plan` and `apply`, further batches may be computed without a plan, see `RepeatedTicks`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from llamaq.common.errors import ErrorCode, InvalidSettings, JobRejected
from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.common.protocol.prompt_logprobs import ScoredToken
from llamaq.common.protocol.queue_and_worker_state import CacheSnapshot, SlotSnapshot
from llamaq.worker.core.batch import Batch, DecodeToken, PrefillChunk, SampledToken, SlotResult
from llamaq.worker.core.draft import NO_DRAFT
from llamaq.worker.core.finish_rules import JobFinish, finish_on_submit, finish_reason, is_end
from llamaq.worker.core.job import Job, Lease
from llamaq.worker.core.outputs import (
    JobEnded,
    Output,
    PromptAdvanced,
    PromptScored,
    SlotAcquired,
    SlotLost,
    TickOutcome,
)
from llamaq.worker.core.slot import COMPUTING, Run, Slot, SlotState
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.kv_cache.prefix_lookup import Candidate
from llamaq.worker.scheduling.adapter_turns import AdapterTurns
from llamaq.worker.scheduling.bulk_share import BulkShare
from llamaq.worker.scheduling.faulty_job_search import FaultyJobSearch
from llamaq.worker.scheduling.finished_job_stats import measure, measure_run, progress_of
from llamaq.worker.scheduling.job_admission import JobAdmission
from llamaq.worker.scheduling.preemption import Preemption
from llamaq.worker.scheduling.repeated_ticks import RepeatedTicks
from llamaq.worker.scheduling.strategies.guarded_strategy import GuardedStrategy
from llamaq.worker.scheduling.surplus_jobs import surplus_jobs
from llamaq.worker.scheduling.tick_measurements import TickMeasurements
from llamaq.worker.scheduling.token_outputs import new_token
from llamaq.worker.scheduling.tokens_ahead.speculation import Speculation
from llamaq.worker.scheduling.tokens_ahead.tokens_ahead import TokensAhead
from llamaq.worker.scheduling.waiting_queue import WaitingQueue

log = logging.getLogger(__name__)


class Scheduler:
    """Runs the jobs of one worker from `submit` to their end.

    Args:
        memory: The slots and the KV memory.
        strategy: Plans the batch of each tick.
        end_tokens: The model's end-of-generation tokens.
        worker: The id of this worker, for the stats.
        bulk_share: The part of the slot time that bulk jobs get while interactive jobs want all of it.
        speculation: Adds drafts to the batches of the strategy. None: no tokens are drafted.
        clock: Returns the time in seconds. Must be monotonic.

    Raises:
        InvalidSettings: A tick's budget is smaller than the number of slots.
    """

    def __init__(
        self,
        memory: KvMemory,
        strategy: GuardedStrategy,
        *,
        end_tokens: frozenset[int],
        worker: str | None = None,
        bulk_share: float = 0.1,
        speculation: Speculation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        n_slots, budget = len(memory.slots), strategy.limits.budget
        if budget < n_slots:
            raise InvalidSettings(f"--n-batch {budget} must be at least --n-parallel {n_slots}")
        self._memory = memory
        self._strategy = strategy
        self._end_tokens = end_tokens
        self._worker = worker
        self._tokens_ahead = TokensAhead(memory, strategy, speculation)
        self._clock = clock
        self._adapter_turns = AdapterTurns(clock)
        self._faulty_job_search = FaultyJobSearch(memory)
        self._waiting = WaitingQueue()
        self._bulk_share = BulkShare(bulk_share, n_slots)
        self._measurements = TickMeasurements(
            memory, self._waiting, strategy, self._bulk_share, self._tokens_ahead, clock
        )
        self._preemption = Preemption(memory, self._waiting, self._bulk_share, self._report_preemption)
        self._admission = JobAdmission(memory, self._waiting, self._bulk_share, self._preemption, self._give_slot)
        self._outputs: list[Output] = []
        self._expired_s = 0.0
        """Time of the last call of `expire`."""
        self.repeater = RepeatedTicks(
            memory,
            self._waiting,
            strategy,
            self._preemption,
            self._tokens_ahead,
            end_tokens=end_tokens,
            on_tick=self._measurements.record_repeated,
            clock=clock,
        )
        """Lets ticks be repeated without a plan."""

    # ---- jobs enter and leave

    def submit(self, job: Job) -> None:
        """Add the job to the waiting queue, or end the job if it needs no slot.

        A job whose prompt cannot fit fails here. A resumed job that is already finished ends here.

        If the scheduler already has an attempt of the same job, the submitted attempt replaces it: the earlier one has
        lost its lease. Both may have the same number, see `Lease`.
        """
        if (replaced := self._find(job.id)) is not None:
            self._remove(replaced)
        job.record_receipt(self._clock())
        job.context_limit = min(job.context_limit, self._memory.n_cells)
        self._waiting.append(job)
        if finish := finish_on_submit(job, self._end_tokens, len(self._memory.slots)):
            self._finish(job, finish)

    def cancel(self, job_id: str) -> bool:
        """End the job as cancelled. Returns False when this worker does not have the job."""
        job = self._find(job_id)
        if job is not None:
            self._finish(job, FinishReason.CANCELLED)
        return job is not None

    def release(self, lease: Lease) -> bool:
        """Drop an attempt of a job without a `JobEnded`: its lease is lost, or it is requeued.

        Returns:
            False when this worker does not have the job, or has another attempt of it.
        """
        job = self._find(lease.job_id)
        if job is None or job.lease is not lease:
            return False
        self._remove(job)
        log.info("job.released id=%s attempt=%d", lease.job_id, lease.attempt)
        return True

    def withdraw_waiting(self) -> list[Job]:
        """Remove and return all jobs without a slot, so that a stopping worker can requeue them."""
        jobs = list(self._waiting)
        for job in jobs:
            self._remove(job)
        return jobs

    def withdraw_surplus(self, n_jobs: int) -> list[Job]:
        """Remove and return waiting bulk jobs, if this worker has more than `n_jobs` jobs; see `surplus_jobs`."""
        n_surplus = len(self._memory.active_slots) + self.n_waiting - n_jobs
        if n_surplus <= 0:
            return []
        n_kept, now_s = self._bulk_share.n_slots, self._clock()
        withdrawn = surplus_jobs(self._waiting.bulk, n_surplus, n_kept=n_kept, now_s=now_s)
        for job in withdrawn:
            self._remove(job)
        return withdrawn

    def withdraw_all(self) -> list[Job]:
        """Remove and return all jobs, including running jobs, without a `JobEnded`.

        Outputs that were created before this call are still returned by the next `apply`.
        """
        jobs = self.withdraw_waiting()
        running = [slot.active.job for slot in self._memory.active_slots]
        for job in running:
            self._remove(job, reusable=True)
        return jobs + running

    # ---- one tick

    def expire(self) -> None:
        """Count the time in slots. End the jobs that have reached their deadline, or had a slot for `timeout_s`."""
        now_s, before_s = self._clock(), self._expired_s
        self._expired_s = now_s
        expired = [job for job in self._waiting if job.times.has_expired(now_s, job.request.timeout_s)]
        for slot in self._memory.active_slots:
            run = slot.active
            job, times = run.job, run.job.times
            times.slot_s += now_s - max(run.admitted_s, before_s)
            if times.has_expired(now_s, job.request.timeout_s):
                expired.append(job)
        for job in expired:
            self._finish(job, FinishReason.DEADLINE)

    def admit(self) -> None:
        """Resume followers, then admit waiting jobs while there is room."""
        self._memory.resume_followers()
        self._faulty_job_search.forget_released()
        if not self._faulty_job_search.is_searching:
            self._admission.admit_waiting()

    def move(self, budget_s: float, prefill_token_s: float = 0.0) -> bool:
        """Move cells between the device, host memory and disk, for about `budget_s` seconds.

        Call this before `plan`. A job whose cells were loaded can then be part of the batch of the same tick, and
        evicted cells are removed before a new prompt needs the room.

        Args:
            budget_s: The time of the transfers, in seconds.
            prefill_token_s: The time in which a token of a prompt is computed, in seconds. 0: not known.

        Returns:
            True when cells were loaded for a job.
        """
        return self._memory.move(budget_s, prefill_token_s)

    def save_ahead(self) -> bool:
        """Save a part of the cells that the next job will evict, in less time than a tick. Call it when idle.

        Returns:
            False when there is nothing to save now.
        """
        return self._memory.save_ahead()

    def plan(self, queue_depth: int = 0) -> Batch:
        """Return the batch of the next tick, which is empty when no slot can compute.

        Args:
            queue_depth: Number of jobs of the queue without a slot, counted a short time ago.
        """
        self.repeater.forbid()
        if not any(slot.state in COMPUTING for slot in self._memory.slots):  # cheap: usually the first slot computes
            return Batch()
        self._measurements.begin()
        slots = self._adapter_turns.slots_of_turn(self._faulty_job_search.slots_of_turn())
        batch = self._strategy.plan(slots, max(queue_depth, self.n_waiting))
        now_s = self._clock()
        for chunk in batch.prefill:
            run = chunk.slot.active
            if run.job.request.prompt_progress and run.prompt_planned_s is None:
                run.prompt_planned_s = now_s
                self._report_progress(run, now_s)
        batch = self._tokens_ahead.add(batch)
        if not self._outputs:  # outputs would wait until the repeated ticks end
            self.repeater.begin_if_possible(batch, now_s)
        return batch

    def apply(self, batch: Batch, results: Iterable[SlotResult]) -> TickOutcome:
        """Update the slots with the engine's results. Returns all outputs since the last call, and the accepted tokens.

        Raises:
            LookupError: A result belongs to a slot that is not in the batch.
        """
        if batch:
            self._measurements.record_slots()
        n_accepted = 0
        now_s = self._clock()
        stopped = self.repeater.take_stopped()  # the texts of an earlier repeated tick have ended their jobs
        parts = {part.slot: part for part in batch.parts}
        without_room = None
        for computed in results:
            if computed.slot not in parts:
                raise LookupError(f"{computed.slot!r} was not in the batch")
            result = self._faulty_job_search.judge(computed)
            if result.slot in stopped:
                self._finish_stopped(result)
                continue
            n_accepted += self._apply_result(result, parts[result.slot], now_s)
            if result.no_room:
                without_room = result.slot
        if not self._faulty_job_search.end_tick() and without_room:
            self._make_room_for(without_room)
        self._preemption.keep_room()
        self._measurements.record_time(batch, self._clock())
        return TickOutcome(self.take_outputs(), n_accepted)

    def take_outputs(self) -> list[Output]:
        """Return the outputs since the last call of this method or of `apply`."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # ---- views

    @property
    def n_waiting(self) -> int:
        """Number of jobs in this worker without a slot."""
        return len(self._waiting)

    @property
    def n_prefill_next(self) -> int:
        """Upper bound on the prompt tokens of the next tick."""
        limits = self._strategy.limits
        pending = (slot.n_pending for slot in self._memory.slots if slot.state is SlotState.PREFILL)
        return min(limits.budget, sum(min(limits.chunk_size, n_pending) for n_pending in pending))

    @property
    def has_work(self) -> bool:
        """Whether the next tick has something to do."""
        return bool(self._memory.active_slots or self._waiting or self._outputs or self._memory.has_transfers)

    def snapshot(self) -> tuple[SlotSnapshot, ...]:
        """Return the public state of all slots."""
        return tuple(slot.snapshot() for slot in self._memory.slots)

    def cache_snapshot(self) -> CacheSnapshot:
        """Return the public state of KV cells and prefix cache."""
        return self._memory.snapshot().model_copy(update={"preemptions": self._preemption.n_preempted})

    def check_integrity(self) -> None:
        """Raise `AssertionError` when the records of jobs, slots, sequences, cells and cache contradict each other."""
        self._memory.check_integrity()
        self._waiting.check_integrity()
        ids = [job.id for job in self._jobs()]
        if len(set(ids)) != len(ids):
            raise AssertionError(f"the scheduler has a job twice: {ids}")
        if gone := self._memory.remembered_jobs.difference(self._waiting):
            raise AssertionError(f"a reusable prefix is remembered for jobs that do not wait: {gone}")

    def __repr__(self) -> str:
        n_active, n_slots = len(self._memory.active_slots), len(self._memory.slots)
        return f"<Scheduler {n_active}/{n_slots} slots, {self.n_waiting} waiting>"

    # ---- jobs gain and lose slots

    def _give_slot(self, candidate: Candidate) -> None:
        now_s = self._clock()
        slot = self._memory.admit(candidate, now_s)
        candidate.job.times.gain_slot(now_s)
        self._outputs.append(SlotAcquired(candidate.job))
        run = slot.active
        log.info("job.admitted id=%s slot=%d prompt_tokens=%d %s", run.job.id, slot.index, run.n_prompt, run.admission)

    def _report_preemption(self, slot: Slot) -> None:
        job, now_s = slot.active.job, self._clock()
        job.preempted_run = measure_run(slot, now_s)
        job.times.lose_slot(now_s)
        self._outputs.append(SlotLost(job))

    # ---- results of a tick

    def _finish_stopped(self, result: SlotResult) -> None:
        """Finish a job whose text has ended in an earlier tick. The tokens of its last result are not used."""
        slot = result.slot
        self._memory.record_progress(slot, result.n_past)
        self._memory.remove_after(slot, len(slot.active.tokens))  # the cells of its draft
        self._finish(slot.active.job, FinishReason.STOP)

    def _apply_result(self, result: SlotResult, part: DecodeToken | PrefillChunk, now_s: float) -> int:
        """Update a slot with its result. Returns the number of draft tokens that became tokens of the output."""
        slot = result.slot
        run = slot.active
        has_advanced, n_before = result.n_past > run.n_past, len(run.tokens)
        self._memory.record_progress(slot, result.n_past)
        if has_advanced and slot.state is SlotState.PREFILL and run.job.request.prompt_progress:
            self._report_progress(run, now_s)
        if run.scores_prompt:
            run.add_prompt_rows(result.prompt_rows)
            if result.sampled:
                self._report_scores(run, result.sampled[0])
        finish = self._append_tokens(slot, result.sampled, now_s) or result.error
        draft = part.draft if isinstance(part, DecodeToken) else NO_DRAFT
        # The last sampled token is never one of the draft, and a job that ends may not use all of the others.
        n_accepted = max(0, min(len(run.tokens) - n_before, len(result.sampled) - 1))
        self._tokens_ahead.end_tick(result, draft, n_before, n_accepted)
        if finish is not None:
            self._finish(run.job, finish)
        elif slot.state is SlotState.DECODE and run.n_pending > 1:
            log.warning("job.cells_lost id=%s slot=%d n_past=%d", run.job.id, slot.index, run.n_past)
            slot.transition_to(SlotState.PREFILL)
        return n_accepted if draft.tokens else 0

    def _report_progress(self, run: Run, now_s: float) -> None:
        self._outputs.append(PromptAdvanced(run.job, progress_of(run, now_s)))

    def _report_scores(self, run: Run, sampled: SampledToken) -> None:
        """Report the probabilities of the prompt's tokens, and of `sampled`, the first token after them, if it ends the
        job.
        """
        has_ended = is_end(run.job, sampled.token, self._end_tokens) and run.max_length > run.n_prompt
        end_token = None
        if has_ended and sampled.logprobs is not None:
            end_token = ScoredToken(sampled.token, *sampled.logprobs)
        self._outputs.append(PromptScored(run.job, run.prompt_logprobs(end_token)))

    def _append_tokens(self, slot: Slot, sampled: Iterable[SampledToken], now_s: float) -> FinishReason | None:
        """Append sampled tokens to the history, up to the last token of the job.

        Returns:
            Why the job is finished. None: it continues.
        """
        run = slot.active
        job, tokens = run.job, run.tokens
        for one in sampled:
            if run.prefilled_s is None:
                run.prefilled_s = now_s
            if len(tokens) >= run.max_length:
                return FinishReason.LENGTH  # the job wants no token
            is_first = job.first_token_s is None
            if is_first:
                job.first_token_s = now_s
            if is_end(job, one.token, self._end_tokens):
                job.end_token = one.token
                return FinishReason.STOP  # an end token ends the text and is not part of it
            tokens.append(one.token)
            output = new_token(job, one, now_s, is_first=is_first)
            self._outputs.append(output)
            if reason := finish_reason(job, len(tokens), run.max_length):
                return reason
            if now_s >= job.generated_until_s and "\n" in output.text:
                return FinishReason.DEADLINE
            if slot.state is SlotState.PREFILL:
                slot.transition_to(SlotState.DECODE)
        return None

    def _make_room_for(self, slot: Slot) -> None:
        """Free cells after llama.cpp found no room for the slot's tokens. The job fails when no cells can be freed."""
        if not self._preemption.free_cells():
            n_past = slot.active.n_past
            message = f"there is no room in KV memory (--n-ctx) after {n_past} tokens, although no other job is running"
            self._finish(slot.active.job, JobRejected(ErrorCode.DECODE_FAILED, message))

    # ---- jobs

    def _jobs(self) -> list[Job]:
        return [*self._waiting, *(slot.active.job for slot in self._memory.active_slots)]

    def _find(self, job_id: str) -> Job | None:
        if (waiting := self._waiting.find(job_id)) is not None:
            return waiting
        return next((slot.active.job for slot in self._memory.active_slots if slot.active.job.id == job_id), None)

    def _finish(self, job: Job, finish: JobFinish) -> None:
        """Remove the job and add its `JobEnded` to the outputs. Only this method ends jobs."""
        stats = measure(job, self._memory.slot_of(job), self._clock(), self._worker)
        if isinstance(finish, JobRejected):
            self._remove(job)
            self._outputs.append(JobEnded(job, stats, error=finish))
        else:
            self._remove(job, reusable=True)
            self._outputs.append(JobEnded(job, stats, reason=finish, text=job.detokenizer.finish()))
        log.info("job.ended id=%s ending=%s generated_tokens=%d", job.id, finish, stats.generated_tokens)

    def _remove(self, job: Job, *, reusable: bool = False) -> None:
        """Remove the job from its slot or from the waiting queue. Other jobs may reuse a `reusable` sequence."""
        job.close()
        if (slot := self._memory.slot_of(job)) is not None:
            self._memory.release(slot, reusable=reusable)
        else:
            self._waiting.remove(job)
            self._memory.forget(job)
