"""A scheduler whose ticks are repeated as often as possible."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.outputs import end_of, first_tokens, tokens_of

from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import JobEnded, Output
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.kv_cache.prefix_cache_interface import NullPrefixCache
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.offload.block_transfers import BlockTransfers
from llamaq.worker.scheduling.strategies.batch_strategies import BatchStrategy
from llamaq.worker.scheduling.tokens_ahead.speculation import Speculation
from llamaq.worker.testing import (
    ByteVocab,
    FakeEngine,
    ManualClock,
    make_job,
    make_memory,
    make_scheduler,
    next_letter,
    run_tick,
    run_to_end,
)

MANY = 1000
PROMPT = make_job().prompt
END_AT = 12


class RepeatedTicksRig:
    """A scheduler whose ticks are repeated as often as possible."""

    def __init__(
        self,
        *jobs: Job,
        n_ctx: int = 4096,
        n_slots: int = 2,
        margin: int = 8,
        caches: bool = False,
        strategy: BatchStrategy | None = None,
        draft_tokens: int = 0,
        speculation: Speculation | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.engine = FakeEngine(n_ctx=n_ctx, n_seq_max=n_slots + 4, next_token=letter_then_end)
        offload = BlockTransfers(BlockStore(16, 10**7, can_cut=True), self.engine.sequences) if caches else None
        self.memory = make_memory(
            self.engine,
            n_slots=n_slots,
            margin=margin,
            cache=RadixPrefixCache() if caches else NullPrefixCache(),
            offload=offload,
        )
        self.scheduler = make_scheduler(
            self.engine,
            self.memory,
            strategy=strategy,
            draft_tokens=draft_tokens,
            speculation=speculation,
            clock=self.clock,
        )
        self.outputs: list[Output] = []
        for job in jobs:
            self.scheduler.submit(job)

    def tick(self, repeats: int = MANY, n_late: int = MANY) -> int:
        """Run a tick, and return how often it was repeated."""
        n_before = len(self.engine.batches)
        self.outputs += run_tick(self.scheduler, self.engine, repeats=repeats, n_late=n_late, clock=self.clock)
        return len(self.engine.batches) - n_before - 1

    def prefill(self) -> None:
        """Run the tick that computes the prompts."""
        assert self.tick() == 0

    def tokens(self, job: Job) -> list[int]:
        return tokens_of(self.outputs, job)

    def end(self, job: Job) -> JobEnded:
        return end_of(self.outputs, job)


def letter_then_end(history: Sequence[int]) -> int:
    """Return letters, and an end token for a prompt that begins with 0 after `END_AT` tokens."""
    return ByteVocab.eos if history[0] == 0 and len(history) == END_AT + 1 else next_letter(history)


def letters(n_tokens: int, prompt: Sequence[int] = PROMPT) -> list[int]:
    """Return the first tokens after the prompt of `make_job`."""
    return first_tokens(prompt, n_tokens)


def run_all(rig: RepeatedTicksRig) -> None:
    """Run ticks with plans until no job is left."""
    rig.outputs += run_to_end(rig.scheduler, rig.engine)


def cached_tokens(rig: RepeatedTicksRig) -> list[list[int]]:
    """Return the tokens of the sequences that no job runs in."""
    running = {slot.active.seq_id for slot in rig.memory.active_slots}
    sequences = rig.engine.sequences
    return [list(sequences.tokens(one)) for one in sequences.memory if one not in running]
