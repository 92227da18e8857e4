"""The interface is proven by a small cache that really keeps sequences: jobs give the same tokens with and without."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llamaq.common.messages import FinishReason
from llamaq.worker.jobs import JobEnded, NewToken, Output
from llamaq.worker.prefix_cache import NullPrefixCache, Prefix, PrefixCache
from llamaq.worker.scheduler import Scheduler
from llamaq.worker.slots import SlotPool
from llamaq.worker.testing import FakeEngine, GreedySampler, ManualClock, make_job, run_tick, run_to_end


class KeepLatest:
    """Keeps whole sequences, the one used last is given up last."""

    def __init__(self, max_entries: int = 100) -> None:
        self.entries: dict[int, list[int]] = {}
        self.evicted: list[int] = []
        self._max_entries = max_entries

    def match(self, tokens: Sequence[int]) -> Prefix | None:
        found = [Prefix(seq_id, common(kept, tokens)) for seq_id, kept in self.entries.items()]
        best = max(found, key=lambda prefix: prefix.n_tokens, default=None)
        if best is None or best.n_tokens == 0:
            return None
        self.entries[best.seq_id] = self.entries.pop(best.seq_id)
        return best

    def insert(self, tokens: Sequence[int], seq_id: int) -> list[int]:
        self.entries[seq_id] = list(tokens)
        return self._pop() if len(self.entries) > self._max_entries else []

    def evict(self, n_cells: int) -> list[int]:
        freed: list[int] = []
        n_freed = 0
        while self.entries and (not freed or n_freed < n_cells):
            n_freed += len(next(iter(self.entries.values())))
            freed += self._pop()
        self.evicted += freed
        return freed

    def check_integrity(self) -> None:
        assert all(self.entries.values())

    def _pop(self) -> list[int]:
        seq_id = next(iter(self.entries))
        del self.entries[seq_id]
        return [seq_id]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def scheduler_with(
    cache: PrefixCache, n_ctx: int = 400, clock: ManualClock | None = None
) -> tuple[Scheduler, FakeEngine]:
    engine = FakeEngine(n_ctx=n_ctx, n_batch=64, n_seq_max=6)
    scheduler = Scheduler(
        SlotPool(2, n_ctx, 6),
        engine,
        budget=64,
        chunk_size=16,
        end_tokens=engine.vocab.end_tokens,
        cache=cache,
        clock=clock or ManualClock(),
    )
    return scheduler, engine


def ended(outputs: list[Output]) -> list[JobEnded]:
    return [output for output in outputs if isinstance(output, JobEnded)]


def tokens_of(outputs: list[Output], job_id: str) -> list[int]:
    return [output.token for output in outputs if isinstance(output, NewToken) and output.job.id == job_id]


PROMPTS = ["Once upon a time", "Once upon a midnight", "Once upon a time there was", "Twice", "Once upon a time"]


def test_the_null_cache_keeps_nothing() -> None:
    cache: PrefixCache = NullPrefixCache()
    assert cache.insert([1, 2, 3], 5) == [5]
    assert cache.match([1, 2, 3]) is None
    assert cache.evict(100) == []
    cache.check_integrity()


@pytest.mark.parametrize("n_ctx", [80, 120, 400])
@pytest.mark.parametrize("max_entries", [1, 3, 100])
def test_jobs_give_the_same_tokens_with_a_cache_as_without(n_ctx: int, max_entries: int) -> None:
    texts: dict[str, list[list[int]]] = {}
    caches: dict[str, PrefixCache] = {"null": NullPrefixCache(), "keep": KeepLatest(max_entries)}
    for name, cache in caches.items():
        scheduler, engine = scheduler_with(cache, n_ctx)
        for at, prompt in enumerate(PROMPTS * 2):
            scheduler.submit(make_job(prompt, job_id=f"j{at}", max_tokens=12))
        outputs = run_to_end(scheduler, engine)
        assert len(ended(outputs)) == len(PROMPTS) * 2
        if isinstance(cache, KeepLatest):
            assert cache.entries == engine.memory
        texts[name] = [tokens_of(outputs, f"j{at}") for at in range(len(PROMPTS) * 2)]
    assert texts["null"] == texts["keep"]


def test_a_job_with_a_kept_prefix_computes_only_the_rest_and_says_so() -> None:
    scheduler, engine = scheduler_with(KeepLatest())
    scheduler.submit(make_job([1] * 30, max_tokens=4))
    run_to_end(scheduler, engine)
    scheduler.submit(make_job([1] * 20 + [2] * 20, job_id="second", max_tokens=4))
    engine.batches.clear()
    (end,) = ended(run_to_end(scheduler, engine))
    assert sum(batch.n_prefill for batch in engine.batches) == 20
    assert (end.stats.prefix_cache_tokens, end.stats.prefix_cache_ratio) == (20, 0.5)
    snapshot = scheduler.cache_snapshot()
    assert (snapshot.hits, snapshot.misses, snapshot.entries) == (1, 1, 2)


def test_rates_count_only_what_was_computed() -> None:
    clock = ManualClock()
    scheduler, engine = scheduler_with(KeepLatest(), clock=clock)
    scheduler.submit(make_job([1] * 30, max_tokens=1))
    run_to_end(scheduler, engine)
    scheduler.submit(make_job([1] * 20 + [2] * 6, resumed=[97, 98], max_tokens=5))
    scheduler.admit()
    clock.now_s += 2
    outputs = run_tick(scheduler, engine)  # 8 tokens were not kept; then the first token of this attempt
    for _ in range(2):
        clock.now_s += 0.5
        outputs += run_tick(scheduler, engine)
    (end,) = ended(outputs)
    assert (end.stats.prompt_eval_rate, end.stats.generation_rate) == (4, 2)
    assert (end.stats.prefix_cache_tokens, end.stats.prefix_cache_ratio) == (20, round(20 / 28, 4))


def test_the_last_token_of_a_prompt_that_is_kept_whole_is_computed_again() -> None:
    scheduler, engine = scheduler_with(KeepLatest())
    for _ in range(2):
        scheduler.submit(make_job([1] * 30, max_tokens=4))
        (end,) = ended(run_to_end(scheduler, engine))
    assert end.stats.prefix_cache_tokens == 29
    assert end.reason is FinishReason.LENGTH


def test_kept_prefixes_give_way_when_a_job_needs_their_cells() -> None:
    cache = KeepLatest()
    scheduler, engine = scheduler_with(cache, n_ctx=100)
    scheduler.submit(make_job([1] * 40, max_tokens=10))
    run_to_end(scheduler, engine)
    assert scheduler.cache_snapshot().reserved_cells == 49
    scheduler.submit(make_job([2] * 60, max_tokens=10))
    run_tick(scheduler, engine)
    assert len(cache.evicted) == 1
    assert scheduler.cache_snapshot().entries == 0


def test_kept_prefixes_stay_when_giving_way_would_not_help() -> None:
    cache = KeepLatest()
    scheduler, engine = scheduler_with(cache, n_ctx=100)
    scheduler.submit(make_job([1] * 20, max_tokens=5))
    run_to_end(scheduler, engine)
    scheduler.submit(make_job([2] * 40, max_tokens=20))
    run_tick(scheduler, engine)
    scheduler.submit(make_job([3] * 60, max_tokens=20))
    run_tick(scheduler, engine)
    assert cache.evicted == []
    assert scheduler.n_waiting == 1


def test_a_sequence_is_given_up_when_all_are_kept() -> None:
    cache = KeepLatest()
    scheduler, engine = scheduler_with(cache, n_ctx=4000)
    for number in range(9):
        scheduler.submit(make_job([number] * 10, max_tokens=2))
        run_to_end(scheduler, engine)
    assert len(cache.evicted) == 3
    assert scheduler.cache_snapshot().entries == 6


def test_jobs_that_opt_out_neither_read_nor_feed_the_cache() -> None:
    cache = KeepLatest()
    scheduler, engine = scheduler_with(cache)
    for expected_entries, cache_prompt in enumerate([False, True, False]):
        scheduler.submit(make_job([1] * 30, max_tokens=4, cache_prompt=cache_prompt))
        (end,) = ended(run_to_end(scheduler, engine))
        assert end.stats.prefix_cache_tokens == 0
        assert len(cache.entries) == min(expected_entries, 1)


def test_the_sequence_of_a_failed_job_is_not_kept() -> None:
    cache = KeepLatest()
    scheduler, engine = scheduler_with(cache)
    scheduler.submit(make_job([1] * 30, max_tokens=9, sampler=GreedySampler(fails_at=3)))
    run_to_end(scheduler, engine)
    assert not cache.entries
    assert not engine.memory


def test_a_prefix_that_memory_cannot_copy_is_computed_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, engine = scheduler_with(KeepLatest())
    scheduler.submit(make_job([1] * 30, max_tokens=4))
    first = run_to_end(scheduler, engine)
    monkeypatch.setattr(engine, "copy", lambda source, target, n_tokens: 0)
    scheduler.submit(make_job([1] * 30, job_id="second", max_tokens=4))
    second = run_to_end(scheduler, engine)
    assert tokens_of(second, "second") == [output.token for output in first if isinstance(output, NewToken)]
    assert (scheduler.cache_snapshot().hits, ended(second)[0].stats.prefix_cache_tokens) == (0, 0)
