"""Random operations on a worker with a prefix cache: jobs generate the same tokens as alone, and no state is corrupt.

`CACHE_OPERATIONS=100000 pytest tests/worker/kv_cache/test_random_operations.py` is the long form (`make soak-cache`).
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Sequence

import pytest
from tests.support.outputs import first_tokens

from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.draft import Draft, Drafting
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import JobEnded, NewToken
from llamaq.worker.core.slot import Run
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.kv_cache.offload_interface import NoOffload
from llamaq.worker.kv_cache.prefix_cache_interface import CachedSequence
from llamaq.worker.kv_cache.prefix_lookup import MIN_GAIN_TOKENS, PrefixLookup
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.offload.block_transfers import BlockTransfers
from llamaq.worker.testing import (
    FakeEngine,
    ManualClock,
    make_job,
    make_memory,
    make_scheduler,
    run_tick,
)

N_OPERATIONS = int(os.environ.get("CACHE_OPERATIONS", "3000"))
SALTS = ("", "a", "b")
N_CTX = 600


class CheckingCache(RadixPrefixCache):
    """Checks that a match has the tokens of the query, and that the query's scope may share them."""

    def match(self, tokens: bytes, scope: Scope, admitted_before: int | None = None):  # type: ignore[no-untyped-def]
        found = super().match(tokens, scope, admitted_before)
        for holder, n_tokens in ((found.source, found.n_held), (found.leader, found.n_coming)):
            if holder is not None:
                owner = holder.scope if isinstance(holder, CachedSequence) else holder.job.scope
                held = holder.tokens if isinstance(holder, CachedSequence) else holder.packed
                assert held[: 4 * n_tokens] == tokens[: 4 * n_tokens]
                assert owner.namespace == scope.namespace or n_tokens <= min(owner.public, scope.public)
                assert isinstance(holder, Run) or holder in self.entries()
        return found


class UnreliableDrafter:
    """Drafts the tokens that the fake model generates. Each is another token with the probability `wrong`."""

    def __init__(self, wrong: float, random_numbers: random.Random) -> None:
        self._wrong = wrong
        self._random = random_numbers

    def propose(self, history: Sequence[int], n_max: int) -> Draft:
        following = first_tokens(history, n_max)
        return Draft(tuple([token if self._random.random() >= self._wrong else 0 for token in following]))


class RandomWorker:
    """A worker to which random operations are applied."""

    def __init__(self, seed: int, *, can_cut: bool, kv_unified: bool) -> None:
        self.random = random.Random(seed)
        n_seq_max = self.random.choice([4, 5, 9, 20]) if kv_unified else 4
        self.engine = FakeEngine(
            n_ctx=N_CTX * (1 if kv_unified else 4),
            n_batch=48,
            n_seq_max=n_seq_max,
            can_cut=can_cut,
            kv_unified=kv_unified,
        )
        self.clock = ManualClock()
        store = BlockStore(
            16 if self.engine.sequences.can_save_parts else None,
            self.random.choice([2_000, 30_000, 10**7]),
            can_cut=can_cut,
        )
        chunk_size = self.random.choice([7, 24])
        cache = CheckingCache(can_cut=can_cut)
        offload = BlockTransfers(store, self.engine.sequences) if self.random.random() < 0.8 else NoOffload()
        self.lookup = PrefixLookup(cache, offload, can_save_parts=self.engine.sequences.can_save_parts)
        self.memory = make_memory(
            self.engine,
            n_slots=3,
            cache=cache,
            offload=offload,
            held_cells=self.random.choice([0, 100, None]),
            similarity=0.2,
            margin=self.random.choice([1, 8, 64]),
        )
        self.draft_tokens = self.random.choice([0, 3, 16]) if can_cut else 0
        self.scheduler = make_scheduler(
            self.engine, self.memory, chunk_size=chunk_size, draft_tokens=self.draft_tokens, clock=self.clock
        )
        self.jobs: dict[str, Job] = {}
        self.generated: defaultdict[str, list[int]] = defaultdict(list)
        self.ended: dict[str, JobEnded] = {}
        self.histories: list[list[int]] = [[self.random.randrange(3)]]

    def apply_random(self, n_operations: int) -> None:
        operations = [
            self.submit,
            self.submit,
            self.cancel,
            self.lose_cells,
            self.pass_time,
            self.save_ahead,
            *[self.tick] * 8,
        ]
        for _ in range(n_operations):
            self.random.choice(operations)()
            self.scheduler.check_integrity()
            self.check_remembered_hits()
        for _ in range(20_000):
            if not self.scheduler.has_work:
                break
            self.tick()
        assert not self.scheduler.has_work
        assert self.jobs.keys() == self.ended.keys()

    def check_remembered_hits(self) -> None:
        """Check that a remembered prefix is not much shorter than the longest one, and not longer."""
        for job in sorted(self.memory.remembered_jobs, key=lambda job: job.id):
            n_remembered = self.memory.find_prefix(job).n_tokens
            assert 0 <= self.lookup.find(job).n_tokens - n_remembered < MIN_GAIN_TOKENS, job

    # ---- operations

    def submit(self) -> None:
        if len(self.jobs) - len(self.ended) > 12:
            return
        before = self.random.choice(self.histories)
        prompt = before[: self.random.randint(1, len(before))] + self.random.choices(
            range(3), k=self.random.randint(1, 60)
        )
        prompt = prompt[:250]
        job = make_job(
            prompt,
            context_limit=min(self.engine.sequences.cells_per_sequence, 300),
            max_tokens=self.random.choice([None, *[self.random.randint(1, 40)] * 9]),
            priority=self.random.choice(["interactive", "bulk"]),
            cache_prompt=self.random.random() < 0.9,
            slot=self.random.choice([None, None, None, 0, 2]),
            timeout_s=self.random.choice([None, None, 20]),
            drafting=self.drafting(),
            stop=self.random.choice([[], [], ["nn"], ["vt", "xq"]]),
        )
        job.scope = Scope(self.random.choice(SALTS), self.random.choice([0, 0, 5, 40]))
        job.system_tokens = min(self.random.choice([0, 20]), len(prompt))
        self.jobs[job.id] = job
        self.scheduler.submit(job)

    def drafting(self) -> Drafting | None:
        """Return the speculation of a job, or None."""
        if not self.draft_tokens or self.random.random() < 0.3:
            return None
        return Drafting(UnreliableDrafter(self.random.choice([0.0, 0.2, 0.9]), self.random), self.random.randint(1, 8))

    def cancel(self) -> None:
        if alive := sorted(self.jobs.keys() - self.ended.keys()):
            self.scheduler.cancel(self.random.choice(alive))

    def lose_cells(self) -> None:
        alive = sorted(self.jobs.keys() - self.ended.keys())
        if alive and self.random.random() < 0.2:
            self.engine.lose_cells(self.random.choice(alive))

    def save_ahead(self) -> None:
        """Do what an idle worker does. Sometimes all jobs end before."""
        if self.random.random() < 0.1:
            while self.scheduler.has_work:
                self.tick()
        if not self.scheduler.has_work:
            self.scheduler.save_ahead()

    def pass_time(self) -> None:
        self.clock.now_s += 1

    def tick(self) -> None:
        repeats, n_late = self.random.choice([0, 0, 1, 20]), self.random.choice([1, 3, 20])
        for output in run_tick(self.scheduler, self.engine, repeats=repeats, n_late=n_late, clock=self.clock):
            assert output.job.id not in self.ended
            if isinstance(output, NewToken):
                self.generated[output.job.id].append(output.token)
            elif isinstance(output, JobEnded):
                self.ended[output.job.id] = output
                self.check(output)

    def check(self, end: JobEnded) -> None:
        generated = self.generated.pop(end.job.id, [])
        assert end.error is None
        assert isinstance(end.job, Job)
        reasons = (FinishReason.LENGTH, FinishReason.STOP, FinishReason.CANCELLED, FinishReason.DEADLINE)
        assert end.reason in reasons
        assert generated == first_tokens(end.job.prompt, len(generated))
        if end.reason is FinishReason.LENGTH:
            assert len(generated) == end.job.max_length - len(end.job.prompt)
        self.histories = [*self.histories[-30:], [*end.job.prompt, *generated]]


@pytest.mark.interpreted  # CheckingCache inherits from a compiled class
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kv_unified", [True, False])
@pytest.mark.parametrize("can_cut", [True, False])
def test_random_operations_break_no_invariant_and_mix_no_jobs(can_cut: bool, kv_unified: bool) -> None:
    n_per_seed = 500
    for seed in range(max(1, N_OPERATIONS // 4 // n_per_seed)):
        worker = RandomWorker(seed, can_cut=can_cut, kv_unified=kv_unified)
        try:
            worker.apply_random(n_per_seed)
        except BaseException as exc:
            exc.add_note(f"seed {seed}")
            raise
