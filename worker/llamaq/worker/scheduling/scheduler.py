"""The scheduler: which job runs in which slot, what a tick computes, and when a job has ended.

It decides, on plain data; the engine does. One tick of a worker is

    scheduler.expire()
    scheduler.admit()
    scheduler.move(budget_s)
    batch = scheduler.plan()
    results = engine.run(batch)
    outbox.put(scheduler.apply(batch, results))

All calls come from one thread, and nothing is called between `plan` and `apply`. Whatever happens to a job
between two ticks leaves through `apply`, in order: tokens first, its end last. A job given to `submit` leaves in
exactly one `JobEnded`, or without one through `release`, `withdraw` or `close`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from llamaq.common.errors import ErrorCode, InvalidSettings, JobRejected
from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.queue_state import CacheSnapshot, SlotSnapshot
from llamaq.worker.core.batch import Batch, SlotResult
from llamaq.worker.core.finish import JobFinish, finish_on_submit, finish_reason
from llamaq.worker.core.job import Job, JobEnded, NewToken, Output
from llamaq.worker.core.sequence_ops import SequenceOps
from llamaq.worker.core.slot import COMPUTING, Slot, SlotState
from llamaq.worker.kv_cache.eviction import Room
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.kv_cache.offload_interface import Offload
from llamaq.worker.kv_cache.prefix_cache import NullPrefixCache, PrefixCache
from llamaq.worker.kv_cache.slot_pool import SlotPool
from llamaq.worker.scheduling.batch_planner import Planner
from llamaq.worker.scheduling.batch_strategy import BatchStrategy, DecodeMaximal
from llamaq.worker.scheduling.job_stats import measure
from llamaq.worker.scheduling.preemption import Preemption
from llamaq.worker.scheduling.waiting_queue import WaitingQueue

log = logging.getLogger(__name__)


class Scheduler:
    """Jobs of one worker between inbox and outbox.

    Args:
        pool: The slots, sequences and cells.
        sequences: The engine, or what else holds the sequences.
        budget: The most tokens of one tick (`n_batch`); at least one a slot.
        chunk_size: The most prompt tokens of one slot in one tick.
        end_tokens: The model's end-of-generation tokens.
        worker: This worker's id, for the stats.
    """

    def __init__(
        self,
        pool: SlotPool,
        sequences: SequenceOps,
        *,
        budget: int,
        chunk_size: int,
        end_tokens: frozenset[int],
        strategy: BatchStrategy | None = None,
        cache: PrefixCache | None = None,
        tiers: Offload | None = None,
        held_cells: int | None = None,
        worker: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if budget < len(pool.slots):
            raise InvalidSettings(f"--n-batch {budget} must be at least --n-parallel {len(pool.slots)}")
        if chunk_size < 1:
            raise InvalidSettings(f"--chunk-size {chunk_size} must be at least 1")
        self.planner = Planner(strategy or DecodeMaximal(), budget, chunk_size)
        self._pool = pool
        self._memory = KvMemory(
            pool, sequences, NullPrefixCache() if cache is None else cache, tiers, held_cells=held_cells
        )
        self._end_tokens = end_tokens
        self._worker = worker
        self._clock = clock
        self._waiting = WaitingQueue()
        self._preemption = Preemption(self._memory, self._waiting)
        self._outputs: list[Output] = []

    # ---- jobs come and go

    def submit(self, job: Job) -> None:
        """Put the job into the waiting line, or end it where it needs no slot.

        A prompt that cannot fit fails here, alone. A resumed job that had come to its end, but whose end was not
        written, ends here. A newer attempt replaces an older one that is still here: its lease was lost and then
        claimed again. Any other job with an id that is here already is dropped.
        """
        if not self.release(job.id, before_attempt=job.lease.attempt) and self._find(job.id) is not None:
            log.error("job.dropped id=%s attempt=%d: this attempt is here already", job.id, job.lease.attempt)
            job.sampler.close()
            return
        job.started_s = self._clock()
        job.context_limit = min(job.context_limit, self._pool.n_cells)
        self._waiting.put(job)
        if ending := finish_on_submit(job, self._end_tokens, len(self._pool.slots)):
            self._end(job, ending)

    def cancel(self, job_id: str) -> bool:
        """End the job as cancelled; False when it is not here."""
        return self._end_early(job_id, FinishReason.CANCELLED)

    def release(self, job_id: str, *, before_attempt: int | None = None) -> bool:
        """Drop the job without an end: it belongs to another attempt now. False when it is not here.

        With `before_attempt` only an older attempt is dropped.
        """
        found = self._find(job_id)
        if found is None:
            return False
        job = found.active.job if isinstance(found, Slot) else found
        if before_attempt is not None and job.lease.attempt >= before_attempt:
            return False
        self._leave(found)
        log.info("job.released id=%s attempt=%d", job.id, job.lease.attempt)
        return True

    def withdraw(self) -> list[Job]:
        """Take the jobs without a slot out again, for a stopping worker to hand back."""
        jobs = list(self._waiting)
        for job in jobs:
            self._leave(job)
        return jobs

    def shed(self, n_jobs: int) -> list[Job]:
        """Take bulk jobs out of the line, the last first, until no more than `n_jobs` are here."""
        n_surplus = len(self._pool.active) + self.n_waiting - n_jobs
        if n_surplus <= 0:
            return []
        bulk = [job for job in self._waiting if job.request.priority is Priority.BULK]
        shed = bulk[::-1][:n_surplus]
        for job in shed:
            self._leave(job)
        return shed

    def close(self) -> list[Job]:
        """Take all jobs out without an end, running ones too; returns them. Outputs that wait are kept for `apply`."""
        jobs = self.withdraw()
        for slot in self._pool.active:
            jobs.append(slot.active.job)
            self._leave(slot, reusable=True)
        return jobs

    def save(self, timeout_s: float) -> None:
        """Write to disk, if there is one, what a later worker may reuse; for about so long. Nothing is moved after."""
        self._memory.close(timeout_s)

    # ---- one tick

    def expire(self) -> None:
        """End the jobs whose `timeout_s` is over."""
        now_s = self._clock()
        for job in self._jobs():
            timeout_s = job.request.timeout_s
            if timeout_s is not None and now_s - job.started_s >= timeout_s:
                self._end_early(job.id, FinishReason.DEADLINE)

    def admit(self) -> None:
        """Let followers go on, and give slots to waiting jobs until one finds no room."""
        self._memory.settle()
        while (job := self._next_job()) is not None:
            room = self._memory.make_room(job)
            if room is Room.NONE and self._preemption.make_way_for(job):
                continue
            if room is not Room.NOW:
                return
            self._waiting.take(job)
            slot = self._memory.enter(job, self._clock())
            log.info("job.admitted id=%s slot=%d state=%s", job.id, slot.index, slot.state.value)

    def plan(self, queue_depth: int = 0) -> Batch:
        """The tokens of the next tick; empty when no job runs. `queue_depth` counts the jobs that wait in Redis."""
        if not any(slot.state in COMPUTING for slot in self._pool):
            return Batch()
        return self.planner.plan(self._pool.slots, queue_depth + self.n_waiting)

    def apply(self, batch: Batch, results: Iterable[SlotResult]) -> list[Output]:
        """Move the slots on by what the engine did, and return all that happened since the last call."""
        planned = {part.slot for part in batch.parts}
        without_room = None
        for result in results:
            if result.slot not in planned:
                raise LookupError(f"{result.slot!r} was not in the batch")
            self._apply(result)
            if result.no_room:
                without_room = result.slot
        if without_room:
            self._relieve(without_room)
        while self._pool.is_overdrawn and self._preemption.free_cells():
            pass  # cells were lost that were shared: they have to be there twice
        outputs, self._outputs = self._outputs, []
        return outputs

    def move(self, budget_s: float) -> bool:
        """Go on moving cells between the device and the tiers behind it, for about so long.

        Before `plan`: what is loaded is computed on in the same tick, and what makes room for a new prompt's cells
        leaves before they are laid out. True when cells came for somebody.
        """
        return self._memory.move(budget_s)

    # ---- what others see

    @property
    def memory(self) -> KvMemory:
        """KV memory, for what is done to it between ticks."""
        return self._memory

    @property
    def n_waiting(self) -> int:
        """Jobs that are here and have no slot yet."""
        return len(self._waiting)

    @property
    def free_slots(self) -> int:
        """How many more jobs may be claimed: idle slots that no job here waits for."""
        return max(0, self._pool.n_idle - self.n_waiting)

    @property
    def n_prefill_next(self) -> int:
        """How many prompt tokens the next tick may read, at most."""
        chunk_size, budget = self.planner.chunk_size, self.planner.budget
        waiting = (slot.n_pending for slot in self._pool if slot.state is SlotState.PREFILL)
        return min(budget, sum(min(chunk_size, n_pending) for n_pending in waiting))

    @property
    def has_work(self) -> bool:
        """Whether a tick would do anything."""
        return bool(self._pool.active or self._waiting or self._outputs or self._memory.is_moving)

    def snapshot(self) -> tuple[SlotSnapshot, ...]:
        """The slots as they are now."""
        return tuple(slot.snapshot() for slot in self._pool)

    def cache_snapshot(self) -> CacheSnapshot:
        """The cells as they are given now, and how often a job found a prefix of its prompt."""
        return self._memory.snapshot().model_copy(update={"preemptions": self._preemption.n_preempted})

    def check_integrity(self) -> None:
        """Raise `AssertionError` when jobs, slots, sequences, cells and cache contradict each other."""
        self._memory.check_integrity()
        ids = [job.id for job in self._jobs()]
        if len(set(ids)) != len(ids):
            raise AssertionError(f"a job is here twice: {ids}")

    def __repr__(self) -> str:
        return f"<Scheduler {len(self._pool.active)}/{len(self._pool.slots)} slots, {self.n_waiting} waiting>"

    # ---- steps

    def _jobs(self) -> list[Job]:
        return [*self._waiting, *(slot.active.job for slot in self._pool.active)]

    def _find(self, job_id: str) -> Slot | Job | None:
        """The slot where the job runs, or the job itself when it waits."""
        slots = (slot for slot in self._pool.active if slot.active.job.id == job_id)
        return next(slots, None) or next((job for job in self._waiting if job.id == job_id), None)

    def _next_job(self) -> Job | None:
        """The job that goes next; where all slots are taken, the one for which another may have to go."""
        if not self._waiting:
            return None
        if not self._pool.n_idle:
            return self._waiting.first_interactive
        return self._waiting.next(self._pool.has_slot, self._memory.gain) or self._waiting.first_interactive

    def _relieve(self, slot: Slot) -> None:
        """llama.cpp found no room for the slot, so more is used than was counted. A job that is alone cannot fit."""
        if not self._preemption.free_cells():
            message = f"there is no room in KV memory (--n-ctx) after {slot.active.n_past} tokens, with nobody else"
            self._end(slot, JobRejected(ErrorCode.DECODE_FAILED, message))

    def _apply(self, result: SlotResult) -> None:
        slot = result.slot
        run = slot.active
        self._memory.progress(slot, result.n_past)
        if result.error is not None:
            self._end(slot, result.error)
        elif result.token is not None:
            self._take(slot, result.token)
        elif slot.state is SlotState.DECODE and run.n_pending > 1:
            log.warning("job.cells_lost id=%s slot=%d n_past=%d", run.job.id, slot.index, run.n_past)
            slot.transition_to(SlotState.PREFILL)

    def _take(self, slot: Slot, token: int) -> None:
        """The slot's job has a new token, which may be its last."""
        run = slot.active
        if run.prefilled_s is None:
            run.prefilled_s = self._clock()
            if run.job.first_token_s is None:
                run.job.first_token_s = run.prefilled_s
        if token in self._end_tokens:
            # It says that the text is over and is no part of it.
            self._end(slot, FinishReason.STOP)
            return
        run.tokens.append(token)
        self._outputs.append(NewToken(run.job, token, run.job.detokenizer.feed(token)))
        if reason := finish_reason(run.job, run.n_generated):
            self._end(slot, reason)
        elif slot.state is SlotState.PREFILL:
            slot.transition_to(SlotState.DECODE)

    def _end_early(self, job_id: str, reason: FinishReason) -> bool:
        found = self._find(job_id)
        if found is not None:
            self._end(found, reason)
        return found is not None

    def _end(self, found: Slot | Job, ending: JobFinish) -> None:
        """The job's only end: out of its place, and its `JobEnded` to the outputs."""
        slot, job = (found, found.active.job) if isinstance(found, Slot) else (None, found)
        stats = measure(job, slot, self._clock(), self._worker)
        if isinstance(ending, JobRejected):
            self._leave(found)
            self._outputs.append(JobEnded(job, stats, error=ending))
        else:
            self._leave(found, reusable=True)
            self._outputs.append(JobEnded(job, stats, reason=ending, text=job.detokenizer.finish()))
        log.info("job.ended id=%s ending=%s generated_tokens=%d", job.id, ending, stats.generated_tokens)

    def _leave(self, found: Slot | Job, *, reusable: bool = False) -> None:
        """Take the job out of its slot or the line; a `reusable` sequence may serve other jobs."""
        if isinstance(found, Slot):
            found.active.job.sampler.close()
            self._memory.leave(found, reusable=reusable)
        else:
            found.sampler.close()
            self._waiting.remove(found)
