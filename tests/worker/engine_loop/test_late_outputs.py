"""The texts of repeated ticks are made while the next batch is computed, and no token is lost, even after errors."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from tests.support.tick_loop_rig import (
    HANG_S,
    WAIT_S,
    Loop,
    RecordingMailbox,
    SlowEngine,
    first_letters,
)

from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.common.protocol.queue_and_worker_state import TickStats
from llamaq.worker.core.batch import Batch, SlotResult
from llamaq.worker.core.draft import Draft, Drafting
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import JobEnded, NewToken
from llamaq.worker.engine_loop.output_mailbox import Message
from llamaq.worker.engine_loop.tick_loop import SNAPSHOT_EVERY_S
from llamaq.worker.generation.detokenizer import StreamDetokenizer
from llamaq.worker.testing.fake_engine import next_letter
from llamaq.worker.testing.fake_job import ByteVocab, GreedySampler, make_job

pytestmark = pytest.mark.interpreted  # the recording classes inherit from compiled ones


def tokens_of(loop: Loop, job: Job) -> list[int]:
    """Return the tokens of the job that were published."""
    return [effect.token for effect in loop.effects if isinstance(effect, NewToken) and effect.job is job]


def test_a_stop_string_ends_a_job_at_most_one_batch_late_and_the_late_token_is_not_used() -> None:
    loop = Loop()
    other, job = make_job(max_tokens=6), make_job(max_tokens=6, stop=[first_letters(3)[2]])
    loop.start(other)
    loop.start(job)
    loop.run_until_empty()
    assert [len(batch.parts) for batch in loop.engine.batches] == [2, 2, 2, 2, 1, 1]
    assert bytes(tokens_of(loop, job)).decode() == first_letters(3)
    assert bytes(tokens_of(loop, other)).decode() == first_letters(6)
    ends = [effect for effect in loop.effects if isinstance(effect, JobEnded)]
    assert [(end.job, end.reason) for end in ends] == [(job, FinishReason.STOP), (other, FinishReason.LENGTH)]
    assert loop.engine.sequences.memory == {}


def test_the_texts_of_repeated_ticks_are_made_while_the_next_batch_is_computed() -> None:
    threads: list[str] = []
    has_text = threading.Event()

    class WatchedDetokenizer(StreamDetokenizer):
        def feed(self, token: int) -> str:
            threads.append(threading.current_thread().name)
            if len(threads) == 3:
                has_text.set()
            return super().feed(token)

    class Engine(SlowEngine):
        def run(self, batch: Batch) -> list[SlotResult]:
            if len(self.batches) == 3:  # the third token, of the second decode tick, has been sampled
                assert has_text.wait(WAIT_S)
            return super().run(batch)

    loop, job = Loop(engine=Engine), make_job(max_tokens=5)
    job.detokenizer = WatchedDetokenizer(ByteVocab().piece)
    loop.start(job)
    loop.run_until_empty()
    engine_thread = threading.current_thread().name
    assert threads == [engine_thread, "publisher", "publisher", "publisher", engine_thread]


class CountingMailbox(RecordingMailbox):
    """Counts the publications."""

    n_publications = 0

    def put(self, messages: Sequence[Message]) -> None:
        self.n_publications += bool(messages)
        super().put(messages)


@pytest.mark.parametrize("kind", ["plain", "stop", "grammar"])
def test_tokens_of_short_repeated_ticks_are_published_together(kind: str) -> None:
    loop = Loop(mailbox=CountingMailbox, stream_interval_s=0.05)
    loop.engine.batch_s = 0.001
    sampler = PreparingSampler() if kind == "grammar" else GreedySampler()
    job = make_job(max_tokens=200, stop=["no letter"] if kind == "stop" else [], sampler=sampler)
    loop.start(job)
    loop.run_until_empty()
    assert len(tokens_of(loop, job)) == 200
    mailbox = loop.shared.outputs
    assert isinstance(mailbox, CountingMailbox)
    assert mailbox.n_publications == 5, "the first token, every 50 ms, and the end"


class LetterDrafter:
    """Drafts the tokens that the fake model generates."""

    def propose(self, history: Sequence[int], n_max: int) -> Draft:
        tokens = list(history)
        while len(tokens) < len(history) + n_max:
            tokens.append(next_letter(tokens))
        return Draft(tuple(tokens[len(history) :]))


@pytest.mark.parametrize("stream_interval_s", [0.0, 0.01])
def test_the_accepted_tokens_of_repeated_ticks_are_counted_and_published_in_order(stream_interval_s: float) -> None:
    loop = Loop(draft_tokens=4, stream_interval_s=stream_interval_s)
    loop.engine.batch_s = 0.001
    job = make_job(max_tokens=150, drafting=Drafting(LetterDrafter(), 4))
    loop.start(job)
    loop.run_until_empty()
    assert bytes(tokens_of(loop, job)).decode() == first_letters(150)
    [end] = [effect for effect in loop.effects if isinstance(effect, JobEnded)]
    ticks = [effect for effect in loop.effects if isinstance(effect, TickStats)]
    assert end.stats.accepted_tokens == sum(tick.accepted_tokens for tick in ticks) > 20
    assert sum(tick.decode_tokens for tick in ticks) == 149, "the first of 150 tokens comes from the prompt"
    assert loop.engine.sequences.memory == {}


class PreparingSampler(GreedySampler):
    """Records the thread and the length of the history of each preparation."""

    can_prepare = True

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[tuple[str, int]] = []
        self.was_prepared = threading.Event()

    def prepare(self, history: Sequence[int], n_prompt: int, n_history: int, draft: Sequence[int]) -> None:
        self.prepared.append((threading.current_thread().name, n_history - n_prompt))
        self.was_prepared.set()


def test_a_draw_is_prepared_while_its_batch_is_computed() -> None:
    class Engine(SlowEngine):
        def run(self, batch: Batch) -> list[SlotResult]:
            if len(self.batches) >= 1:  # the first one is the prompt
                assert sampler.was_prepared.wait(WAIT_S)
                sampler.was_prepared.clear()
            return super().run(batch)

    sampler = PreparingSampler()
    loop = Loop(engine=Engine, stream_interval_s=60.0)
    loop.start(make_job(max_tokens=6, sampler=sampler))
    loop.run_until_empty()
    assert sampler.prepared == [("publisher", n_tokens) for n_tokens in (1, 2, 3, 4, 5)]


def test_tokens_are_published_before_the_next_draws_are_prepared() -> None:
    published: list[int] = []

    class LateSampler(PreparingSampler):
        def prepare(self, history: Sequence[int], n_prompt: int, n_history: int, draft: Sequence[int]) -> None:
            super().prepare(history, n_prompt, n_history, draft)
            published.append(len(tokens_of(loop, job)))

    loop, job = Loop(), make_job(max_tokens=6, sampler=LateSampler())
    loop.start(job)
    loop.run_until_empty()
    assert published == [1, 2, 3, 4, 5]


def test_tokens_whose_texts_were_not_made_before_an_error_of_the_engine_are_published() -> None:
    class Engine(SlowEngine):
        def run(self, batch: Batch) -> list[SlotResult]:
            if len(self.batches) == 6:
                raise OSError("expected")
            return super().run(batch)

    loop, job = Loop(engine=Engine, stream_interval_s=60.0), make_job(max_tokens=9)
    loop.start(job)
    with pytest.raises(OSError, match="expected"):
        loop.run_until_empty()
    assert bytes(tokens_of(loop, job)).decode() == first_letters(6)


@pytest.mark.parametrize("stream_interval_s", [0.0, 60.0])
def test_an_error_while_a_text_is_made_ends_the_loop(stream_interval_s: float) -> None:
    class FaultyDetokenizer(StreamDetokenizer):
        n_fed = 0

        def feed(self, token: int) -> str:
            self.n_fed += 1
            if self.n_fed == 4:
                raise ValueError("expected")
            return super().feed(token)

    loop, job = Loop(stream_interval_s=stream_interval_s), make_job(max_tokens=1000)
    job.detokenizer = FaultyDetokenizer(ByteVocab().piece)
    loop.start(job)
    with pytest.raises(ValueError, match="expected"):
        loop.run_until_empty()
    assert bytes(tokens_of(loop, job)).decode() == first_letters(3)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("stream_interval_s", [0.0, 60.0])
@pytest.mark.parametrize("fails_in", ["feed", "prepare"])
def test_the_panic_of_a_library_on_the_publishing_thread_ends_the_loop(fails_in: str, stream_interval_s: float) -> None:
    class Panic(BaseException):
        """As `PanicException` of a library in Rust, it is not an `Exception`."""

    class PanickingSampler(PreparingSampler):
        can_prepare = fails_in == "prepare"

        def prepare(self, history: Sequence[int], n_prompt: int, n_history: int, draft: Sequence[int]) -> None:
            super().prepare(history, n_prompt, n_history, draft)
            if len(self.prepared) == 3:
                raise Panic

    class PanickingDetokenizer(StreamDetokenizer):
        n_fed = 0

        def feed(self, token: int) -> str:
            self.n_fed += 1
            if fails_in == "feed" and self.n_fed == 4:
                raise Panic
            return super().feed(token)

    loop, job = Loop(stream_interval_s=stream_interval_s), make_job(max_tokens=1000, sampler=PanickingSampler())
    job.detokenizer = PanickingDetokenizer(ByteVocab().piece)
    loop.start(job)
    with pytest.raises(Panic):
        loop.run_until_empty()
    published = tokens_of(loop, job)
    assert len(published) >= 3
    assert bytes(published).decode() == first_letters(len(published))


def test_a_snapshot_that_is_due_ends_the_repetition_of_a_tick() -> None:
    generated: list[int] = []

    class Watching(SlowEngine):
        def run(self, batch: Batch) -> list[SlotResult]:
            generated.append(loop.ticks.snapshot.slots[0].generated_tokens or 0)
            return super().run(batch)

    loop = Loop(engine=Watching)
    loop.engine.batch_s = SNAPSHOT_EVERY_S / 4
    loop.start(make_job(max_tokens=20))
    loop.run_until_empty()
    assert sorted(set(generated)) == [0, 4, 8, 12, 16]


def test_a_repeated_tick_does_not_count_as_a_hang() -> None:
    ages: list[float] = []

    class Watching(SlowEngine):
        def run(self, batch: Batch) -> list[SlotResult]:
            ages.append(loop.ticks.liveness.tick_age_s)
            return super().run(batch)

    loop = Loop(engine=Watching)
    loop.engine.batch_s = 0.01
    loop.start(make_job(max_tokens=20))
    loop.run_until_empty()
    assert len(ages) == 20
    assert set(ages) == {0.0}
    assert loop.ticks.liveness.hang_after_s == HANG_S
