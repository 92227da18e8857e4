"""On a GPU, blocks are saved only if their tokens take much longer to compute again."""

from __future__ import annotations

import pytest

from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.packed_tokens import pack
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.kv_cache.prefix_cache_interface import CachedSequence
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.offload.block_transfers import BlockTransfers
from llamaq.worker.offload.save_costs import LEAST_GAIN, MIN_SAMPLE_TOKENS, N_SAMPLES, TRIAL_EVERY_S, SaveCosts
from llamaq.worker.testing import FakeEngine, make_job, make_memory, make_scheduler, run_to_end

BLOCK = 64
PROMPT_S, GENERATED_S = 2.7e-3, 70e-3
"""Seconds in which a block is saved on a GPU: with the cells of a prompt, and with those of generated tokens."""
FAST_S, SLOW_S, SLOWEST_S = 45e-6, 300e-6, 10e-3
"""Seconds in which a token of a prompt is computed."""


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def measured(prefill_token_s: float, clock: Clock | None = None) -> SaveCosts:
    costs = SaveCosts(clock or Clock())
    costs.prefill_token_s = prefill_token_s
    for _ in range(N_SAMPLES):
        assert costs.is_worth_saving(BLOCK, BLOCK), "not known yet"
        costs.record(BLOCK, BLOCK, GENERATED_S)
        costs.record(BLOCK, 0, PROMPT_S)
    return costs


@pytest.mark.parametrize(
    ("prefill_token_s", "are_prompts_saved", "are_outputs_saved"),
    [(0.0, True, True), (FAST_S, False, False), (SLOW_S, True, False), (SLOWEST_S, True, True)],
)
def test_a_block_is_saved_if_its_tokens_take_much_longer_to_compute(
    prefill_token_s: float, are_prompts_saved: bool, are_outputs_saved: bool
) -> None:
    costs = measured(prefill_token_s)
    assert costs.is_worth_saving(BLOCK, 0) is are_prompts_saved
    assert costs.is_worth_saving(BLOCK, BLOCK) is are_outputs_saved


@pytest.mark.parametrize(
    ("gain", "is_saved", "is_saved_when_idle"), [(0.9, False, False), (1.1, False, True), (2.1, True, True)]
)
def test_an_idle_worker_saves_also_what_is_computed_a_little_more_slowly(
    gain: float, is_saved: bool, is_saved_when_idle: bool
) -> None:
    costs = measured(gain * PROMPT_S / BLOCK)
    assert costs.is_worth_saving(BLOCK, 0) is is_saved
    assert costs.is_worth_saving(BLOCK, 0, is_idle=True) is is_saved_when_idle


def test_the_share_of_scattered_cells_counts() -> None:
    costs = measured(SLOW_S)
    limit_s = BLOCK * SLOW_S / LEAST_GAIN
    n_most = int((limit_s - PROMPT_S) / ((GENERATED_S - PROMPT_S) / BLOCK))
    assert 0 < n_most < BLOCK
    assert costs.is_worth_saving(BLOCK, n_most)
    assert not costs.is_worth_saving(BLOCK, n_most + 1)


def test_a_disturbance_does_not_count() -> None:
    costs = SaveCosts(Clock())
    costs.prefill_token_s = SLOW_S
    for index in range(N_SAMPLES):
        costs.record(BLOCK, 0, PROMPT_S if index else GENERATED_S)
    assert costs.is_worth_saving(BLOCK, 0)


def test_short_blocks_are_not_measured() -> None:
    costs = measured(FAST_S)
    for _ in range(N_SAMPLES):
        costs.record(MIN_SAMPLE_TOKENS - 1, 0, 0.0)
        costs.record(BLOCK, MIN_SAMPLE_TOKENS - 1, 0.0)
    assert not costs.is_worth_saving(BLOCK, 0)


@pytest.mark.parametrize(("n_scattered", "seconds"), [(0, PROMPT_S), (BLOCK, GENERATED_S)])
def test_after_a_while_blocks_are_measured_again(n_scattered: int, seconds: float) -> None:
    clock = Clock()
    costs = measured(FAST_S, clock)
    clock.now_s += TRIAL_EVERY_S
    costs.record(BLOCK, BLOCK - n_scattered, GENERATED_S)  # the other kind is known
    costs.prefill_token_s = SLOW_S if n_scattered else FAST_S
    assert costs.is_worth_saving(BLOCK, n_scattered)
    costs.record(BLOCK, n_scattered, seconds)
    assert not costs.is_worth_saving(BLOCK, n_scattered)


def test_an_entry_is_saved_up_to_its_first_block_that_is_not_worth_it() -> None:
    tokens = pack(range(4 * BLOCK))
    sequences = FakeEngine(n_ctx=1000, n_batch=100, n_seq_max=9).sequences
    sequences.append(0, list(range(4 * BLOCK)))
    costs = measured(SLOW_S)
    transfers = BlockTransfers(BlockStore(BLOCK, 10**9, 0, can_cut=True), sequences, costs=costs)
    entry = CachedSequence(0, tokens, Scope())
    entry.n_adjacent = 2 * BLOCK
    assert transfers.start_save(entry)
    while transfers.has_transfers:
        transfers.step(0, SLOW_S)
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
