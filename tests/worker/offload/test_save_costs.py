"""Scattered cells are not saved where this takes longer than to compute them again."""

from __future__ import annotations

import pytest

from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.packed_tokens import pack
from llamaq.worker.kv_cache.blocks.block_tiers import BlockStore
from llamaq.worker.kv_cache.cached_prefix_index import CachedSequence, RadixPrefixCache
from llamaq.worker.offload.block_transfers import BlockTransfers
from llamaq.worker.offload.save_costs import CHEAP_TOKEN_S, N_SAMPLES, TRIAL_EVERY_S, SaveCosts
from llamaq.worker.testing import FakeEngine, make_job, make_memory, make_scheduler, run_to_end

BLOCK = 64
ON_GPU_S, ON_CPU_S = 0.07, 0.001
"""Seconds in which a block of scattered cells is saved."""
FAST_PREFILL_S, SLOW_PREFILL_S = 45e-6, 5e-3
"""Seconds in which a token of a prompt is computed."""


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def measured(block_s: float, prefill_token_s: float, clock: Clock | None = None) -> SaveCosts:
    costs = SaveCosts(clock or Clock())
    costs.prefill_token_s = prefill_token_s
    for _ in range(N_SAMPLES):
        assert costs.is_worth_saving(BLOCK, BLOCK), "not known yet"
        costs.record(BLOCK, block_s)
    return costs


@pytest.mark.parametrize(
    ("block_s", "prefill_token_s", "is_worth"),
    [
        (ON_GPU_S, FAST_PREFILL_S, False),
        (ON_GPU_S, SLOW_PREFILL_S, True),
        (ON_GPU_S, 0.0, False),
        (ON_CPU_S, FAST_PREFILL_S, True),
        (ON_CPU_S, SLOW_PREFILL_S, True),
    ],
)
def test_scattered_cells_are_saved_if_to_compute_them_again_takes_longer(
    block_s: float, prefill_token_s: float, is_worth: bool
) -> None:
    costs = measured(block_s, prefill_token_s)
    assert costs.is_worth_saving(BLOCK, BLOCK) is is_worth
    assert costs.is_worth_saving(BLOCK, 0), "the cells of prompts"


def test_a_block_with_few_scattered_cells_is_saved() -> None:
    costs = measured(ON_GPU_S, FAST_PREFILL_S)
    n_cheap = int(BLOCK * CHEAP_TOKEN_S / (ON_GPU_S / BLOCK))
    assert costs.is_worth_saving(BLOCK, n_cheap)
    assert not costs.is_worth_saving(BLOCK, n_cheap + 1)


def test_a_few_disturbances_do_not_count() -> None:
    costs = SaveCosts(Clock())
    for index in range(N_SAMPLES):
        costs.record(BLOCK, ON_GPU_S if index < N_SAMPLES // 2 else ON_CPU_S)
    assert costs.is_worth_saving(BLOCK, BLOCK)


def test_after_a_while_scattered_cells_are_measured_again() -> None:
    clock = Clock()
    costs = measured(ON_GPU_S, FAST_PREFILL_S, clock)
    clock.now_s += TRIAL_EVERY_S
    assert costs.is_worth_saving(BLOCK, BLOCK)
    costs.record(BLOCK, ON_GPU_S)
    assert not costs.is_worth_saving(BLOCK, BLOCK)


def test_an_entry_is_saved_up_to_its_first_block_that_is_not_worth_it() -> None:
    tokens = pack(range(4 * BLOCK))
    sequences = FakeEngine(n_ctx=1000, n_batch=100, n_seq_max=9).sequences
    sequences.append(0, list(range(4 * BLOCK)))
    costs = measured(ON_GPU_S, FAST_PREFILL_S)
    transfers = BlockTransfers(BlockStore(BLOCK, 10**9, 0, can_cut=True), sequences, costs=costs)
    entry = CachedSequence(0, tokens, Scope())
    entry.n_adjacent = 2 * BLOCK
    assert transfers.start_save(entry)
    while transfers.has_transfers:
        transfers.step(0, FAST_PREFILL_S)
    stored = transfers.match(tokens, Scope())
    assert stored is not None
    assert stored.n_tokens == 2 * BLOCK
    assert not transfers.start_save(entry), "what is worth it is saved"
    assert not transfers.save_ahead(entry)


def test_the_cells_that_a_job_has_generated_are_scattered_also_in_the_jobs_that_reuse_them() -> None:
    engine = FakeEngine(n_ctx=4000, n_batch=100, n_seq_max=9)
    cache = RadixPrefixCache()
    scheduler = make_scheduler(engine, make_memory(engine, cache=cache))

    def run_job(prompt: list[int]) -> CachedSequence:
        scheduler.submit(make_job(prompt, max_tokens=20))
        run_to_end(scheduler, engine)
        (entry,) = cache.entries()  # the tokens of the older entry are a prefix of those of the new one
        return entry

    first = run_job([7] * 40)
    assert (first.n_tokens, first.n_adjacent) == (59, 40)
    second = run_job([*memoryview(first.tokens).cast("i"), *[9] * 30])
    assert (second.n_tokens, second.n_adjacent) == (108, 40)
