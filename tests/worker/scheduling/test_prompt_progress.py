"""A job that asks for it reports how much of its prompt is computed: at first, and after each chunk."""

from __future__ import annotations

from typing import Any

from llamaq.worker.core.outputs import NewToken, Output, PromptAdvanced, SlotLost
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.testing import FakeEngine, ManualClock, make_job, make_memory, make_scheduler, run_tick

PROMPT = [1] * 20


class Rig:
    """A scheduler with a prefix cache. A tick takes 10 ms and computes at most 8 tokens of a prompt."""

    def __init__(self, n_slots: int = 1) -> None:
        self.engine = FakeEngine(n_ctx=400, n_batch=32, n_seq_max=n_slots + 4)
        self.clock = ManualClock()
        memory = make_memory(self.engine, n_slots=n_slots, cache=RadixPrefixCache())
        self.scheduler = make_scheduler(self.engine, memory, chunk_size=8, clock=self.clock)
        self.outputs: list[Output] = []

    def submit(self, prompt: list[int] = PROMPT, *, resumed: list[int] | None = None, **params: object) -> None:
        options: dict[str, Any] = {"prompt_progress": True, "max_tokens": 4, **params}
        self.scheduler.submit(make_job(prompt, resumed=resumed or (), **options))

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.clock.now_s += 0.01
            self.outputs += run_tick(self.scheduler, self.engine)

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.tick()

    def taken(self) -> list[Output]:
        outputs, self.outputs = self.outputs, []
        return outputs


def numbers(outputs: list[Output]) -> list[tuple[int, int, int]]:
    """Return the tokens in total, from the cache and ready of each report."""
    found = (output.progress for output in outputs if isinstance(output, PromptAdvanced))
    return [(each.total_tokens, each.cached_tokens, each.processed_tokens) for each in found]


def test_each_chunk_is_reported_before_the_first_token() -> None:
    rig = Rig()
    rig.submit()
    rig.finish()
    assert numbers(rig.outputs) == [(20, 0, 0), (20, 0, 8), (20, 0, 16), (20, 0, 20)]
    kinds = [type(output).__name__ for output in rig.outputs]
    assert kinds == ["SlotAcquired", *["PromptAdvanced"] * 4, *["NewToken"] * 4, "JobEnded"]
    times_ms = [output.progress.time_ms for output in rig.outputs if isinstance(output, PromptAdvanced)]
    assert times_ms == [0, 0, 10, 20]


def test_a_job_that_does_not_ask_reports_nothing() -> None:
    rig = Rig()
    rig.submit(prompt_progress=False)
    rig.finish()
    assert not numbers(rig.outputs)


def test_tokens_from_the_prefix_cache_are_ready_at_first() -> None:
    rig = Rig()
    rig.submit()
    rig.finish()
    rig.taken()
    rig.submit([*PROMPT, 2, 3, 4])
    rig.finish()
    assert numbers(rig.outputs) == [(23, 20, 20), (23, 20, 23)]


def test_a_job_that_another_worker_resumes_also_computes_its_own_tokens_again() -> None:
    rig = Rig()
    rig.submit(resumed=[7, 8])
    rig.finish()
    assert numbers(rig.outputs) == [(22, 0, 0), (22, 0, 8), (22, 0, 16), (22, 0, 22)]


def test_a_preempted_job_reports_its_next_run_too() -> None:
    rig = Rig()
    rig.submit(priority="bulk", max_tokens=30)
    rig.tick(6)
    before = rig.taken()
    rig.submit([2] * 8, prompt_progress=False, max_tokens=1)
    rig.finish()
    (lost,) = (at for at, output in enumerate(rig.outputs) if isinstance(output, SlotLost))
    n_tokens = 20 + sum(isinstance(output, NewToken) for output in [*before, *rig.outputs[:lost]])
    assert numbers(before)[-1] == (20, 0, 20)
    assert numbers(rig.outputs) == [(n_tokens, n_tokens - 1, n_tokens - 1), (n_tokens, n_tokens - 1, n_tokens)]


def test_a_tick_that_computes_nothing_is_not_reported() -> None:
    rig = Rig(n_slots=2)
    rig.submit()
    rig.submit([2] * 8, prompt_progress=False, max_tokens=30)
    rig.engine.refuse()
    rig.finish()
    assert numbers(rig.outputs) == [(20, 0, 0), (20, 0, 8), (20, 0, 15), (20, 0, 20)]
