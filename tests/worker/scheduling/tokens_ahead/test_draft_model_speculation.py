"""Speculation with a fake draft model, which executes each plan on lists of tokens and checks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from random import Random

import pytest
from tests.support.outputs import tokens_of

from llamaq.worker.core.batch import Batch
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.draft import NO_DRAFT, Draft, Drafting
from llamaq.worker.core.draft_plan import DraftPart, DraftWork
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import JobEnded, Output, SlotLost
from llamaq.worker.core.slot import Slot
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.scheduling.scheduler import Scheduler
from llamaq.worker.scheduling.strategies.batch_strategies import DecodeMaximal
from llamaq.worker.scheduling.strategies.guarded_strategy import GuardedStrategy, TickLimits
from llamaq.worker.scheduling.strategies.tick_times import TickTime, TickTimeModel
from llamaq.worker.scheduling.tokens_ahead.draft_model_speculation import DraftModelSpeculation
from llamaq.worker.scheduling.tokens_ahead.draft_model_trials import TRIAL_SHARE
from llamaq.worker.scheduling.tokens_ahead.draft_sequences import DraftSequences
from llamaq.worker.scheduling.tokens_ahead.speculation import TRIAL_AFTER
from llamaq.worker.testing import FakeEngine, ManualClock, make_job, make_memory, next_letter

NextToken = Callable[[Sequence[int]], int]
TICK_S, TOKEN_S = 0.01, 0.001
"""Time of a tick of the fake engine, and of each draft token in it."""
WRONG = ord("?")
DEFAULT_SCOPE = Scope()


def right(history: Sequence[int]) -> int:
    return next_letter(history)


def wrong(_: Sequence[int]) -> int:
    return WRONG


class FakeDraftModel:
    """A draft model whose sequences are lists of tokens."""

    def __init__(
        self, clock: ManualClock, next_token: NextToken, n_cells: int, step_s: float, step_draft_s: float
    ) -> None:
        self.next_token = next_token
        self.held: dict[int, list[int]] = {}
        self.plans: list[list[DraftPart]] = []
        self.work_s = 0.0
        self.improbable = False
        self.fails_after: int | None = None
        self.losing: set[int] = set()
        self.step_s, self.missing_s = step_s, step_s / 10
        self.step_draft_s = step_draft_s
        self._clock = clock
        self._n_cells = n_cells

    def measure(self, n_drafts: int) -> DraftWork:
        return DraftWork(10, 10 * self.missing_s, 3, 3 * n_drafts, 3 * (self.step_s + n_drafts * self.step_draft_s))

    def add_drafts(self, batch: Batch) -> Batch:
        plan = batch.draft_plan
        if not plan:
            return batch
        if self.fails_after is not None and len(self.plans) >= self.fails_after:
            return replace(batch, draft_work=DraftWork(has_failed=True))
        self.plans.append(list(plan.parts))
        for index in plan.emptied:
            self.held[index] = []
        lost = frozenset(part.slot.index for part in plan.parts if part.slot.index in self.losing)
        for index in lost:
            self.held[index] = []
        self.losing.clear()
        parts = [part for part in plan.parts if part.slot.index not in lost]
        drafts = {part.slot: self._draft(part) for part in parts}
        n_steps = max((draft.n_places for draft in drafts.values()), default=0)
        n_before_steps = sum(part.n_before_steps for part in parts)
        n_step_drafts = sum(draft.n_places for draft in drafts.values())
        steps_s = n_steps * self.step_s + n_step_drafts * self.step_draft_s
        work = DraftWork(n_before_steps, n_before_steps * self.missing_s, n_steps, n_step_drafts, steps_s, lost)
        self._clock.now_s += work.seconds
        self.work_s += work.seconds
        assert sum(map(len, self.held.values())) <= self._n_cells
        decode = tuple(part._replace(draft=drafts.get(part.slot, NO_DRAFT)) for part in batch.decode)
        return replace(batch, decode=decode, draft_work=work)

    def _draft(self, part: DraftPart) -> Draft:
        held, history = self.held.setdefault(part.slot.index, []), part.slot.active.tokens
        assert part.n_kept < len(history)
        assert part.n_kept <= len(held)
        assert held[: part.n_kept] == history[: part.n_kept]
        assert part.n_missing > 0
        assert part.n_past == len(history) or not part.n_tokens
        held[part.n_kept :] = history[part.n_kept : part.n_past]
        if part.n_tokens and self.improbable:
            return Draft(stopped_early=True)
        draft: list[int] = []
        for _ in range(part.n_tokens):
            draft.append(self.next_token([*history, *draft]))
        held += draft[:-1]
        return Draft(tuple(draft))


class Rig:
    def __init__(
        self,
        next_token: NextToken = right,
        *,
        n_slots: int = 2,
        n_ctx: int = 2000,
        draft_cells: int | None = None,
        held_cells: int = 0,
        n_vocab: int = 1000,
        step_s: float = 0.001,
        max_missing: int = 64,
        drafts: bool = True,
        limit_s: float = inf,
        step_draft_s: float = 0.0,
        slot_s: float = 0.0,
        is_measured: bool = False,
    ) -> None:
        self.slot_s = slot_s
        self.clock = ManualClock()
        self.engine = FakeEngine(n_ctx=n_ctx, n_batch=64, n_seq_max=n_slots + 4, next_token=next_letter)
        self.memory = make_memory(self.engine, n_slots=n_slots, cache=RadixPrefixCache())
        n_cells = draft_cells or n_ctx
        self.draft_model = FakeDraftModel(self.clock, next_token, n_cells, step_s, step_draft_s)
        self.strategy = WithLimit(limit_s)
        self.sequences = DraftSequences(n_slots, n_cells, n_vocab, held_cells)
        end_tokens = self.engine.vocab.end_tokens
        measured = [self.draft_model.measure(number) for number in (1, n_slots)] if is_measured else []
        planner = DraftModelSpeculation(end_tokens, 32, self.sequences, max_missing=max_missing, measured=measured)
        self.scheduler = Scheduler(
            self.memory,
            GuardedStrategy(self.strategy, TickLimits(64, 16)),
            end_tokens=end_tokens,
            speculation=planner if drafts else None,
            clock=self.clock,
        )

    def run(self, *jobs: Job) -> list[Output]:
        for job in jobs:
            self.scheduler.submit(job)
        outputs = []
        while self.scheduler.has_work:
            outputs += self.tick()
        return outputs

    def tick(self) -> list[Output]:
        scheduler = self.scheduler
        scheduler.expire()
        scheduler.admit()
        scheduler.move(0.0)
        batch = self.draft_model.add_drafts(scheduler.plan())
        self.clock.now_s += TICK_S + self.slot_s * batch.n_decode + TOKEN_S * batch.n_drafted if batch else 0.0
        outputs = [*scheduler.apply(batch, self.engine.run(batch)).outputs]
        scheduler.check_integrity()
        return outputs

    @property
    def n_drafted(self) -> int:
        return sum(batch.n_drafted for batch in self.engine.batches)


class WithLimit(DecodeMaximal):
    """A strategy whose ticks with drafts may take `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.ticks: list[TickTime] = []

    def record_tick(self, tick: TickTime) -> None:
        self.ticks.append(tick)

    def draft_limit_s(self, _: Sequence[Slot]) -> float:
        return self.limit_s


def drafted_job(
    prompt: str = "Hello", *, max_tokens: int = 60, n_max: int = 8, scope: Scope | None = DEFAULT_SCOPE
) -> Job:
    """Return a job with drafts. `scope` None: it shares no cells."""
    drafting, cache_prompt = Drafting(None, n_max), scope is not None
    job = make_job(prompt, max_tokens=max_tokens, drafting=drafting, cache_prompt=cache_prompt)
    job.scope = scope or DEFAULT_SCOPE
    return job


def expected_tokens(prompt: str, n_tokens: int) -> list[int]:
    rig, job = Rig(drafts=False), make_job(prompt, max_tokens=n_tokens)
    return tokens_of(rig.run(job), job)


def test_accepted_drafts_come_in_fewer_ticks_and_are_the_tokens_of_a_job_without_drafts() -> None:
    rig, job = Rig(), drafted_job()
    outputs = rig.run(job)
    assert tokens_of(outputs, job) == expected_tokens("Hello", 60)
    assert len(rig.engine.batches) < 20
    stats = outputs[-1].stats if isinstance(outputs[-1], JobEnded) else None
    assert stats is not None
    assert stats.drafted_tokens == stats.accepted_tokens == rig.n_drafted > 40
    # Each history token is computed once, but for the last token of each draft, which is not computed in its draft.
    assert max(part.n_missing for plan in rig.draft_model.plans[1:] for part in plan) <= 2


def test_a_wrong_draft_model_takes_little_time_and_the_output_is_the_same() -> None:
    rig, job = Rig(wrong), drafted_job(max_tokens=700)
    assert tokens_of(rig.run(job), job) == expected_tokens("Hello", 700)
    assert rig.n_drafted > 4, "it is tried again from time to time"
    assert rig.draft_model.work_s + TOKEN_S * rig.n_drafted <= 1.5 * TRIAL_SHARE * rig.clock.now_s


def test_a_draft_model_that_becomes_right_is_used_again() -> None:
    rig = Rig(wrong)
    rig.run(drafted_job(max_tokens=300))
    n_drafted, n_ticks = rig.n_drafted, len(rig.engine.batches)
    rig.draft_model.next_token = right
    rig.run(drafted_job("Other", max_tokens=4 * TRIAL_AFTER))
    assert rig.n_drafted - n_drafted > TRIAL_AFTER
    assert len(rig.engine.batches) - n_ticks < 3.5 * TRIAL_AFTER


def test_a_draft_model_that_finds_no_probable_token_is_not_asked_in_every_tick() -> None:
    rig = Rig()
    rig.draft_model.improbable = True
    rig.run(drafted_job(max_tokens=400))
    assert rig.n_drafted == 0
    assert 1 <= len(rig.draft_model.plans) <= 20


def test_a_draft_model_as_slow_as_the_model_drafts_only_in_trials(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(step_s=TICK_S)
    with caplog.at_level("INFO"):
        rig.run(drafted_job(max_tokens=400))
    assert rig.n_drafted <= 8
    assert caplog.text.count("draft_model.measured") == 1
    assert "1: 10.00 ms" in caplog.text


@pytest.mark.parametrize("is_measured", [True, False])
def test_a_step_with_several_drafts_takes_longer_than_a_step_with_one(is_measured: bool) -> None:
    slow = Rig(n_slots=4, step_s=0.0, step_draft_s=0.01, slot_s=0.01, is_measured=is_measured)
    slow.run(*(drafted_job(text, max_tokens=100) for text in ("a", "b", "c", "d")))
    assert slow.n_drafted <= 16, "trials: a step with four drafts takes as long as a tick"
    quick = Rig(n_slots=4, step_s=0.001, step_draft_s=0.001, slot_s=0.01, is_measured=is_measured)
    quick.run(*(drafted_job(text, max_tokens=100) for text in ("a", "b", "c", "d")))
    assert quick.n_drafted > 200


def test_drafts_are_short_until_the_time_of_their_steps_is_known() -> None:
    rig = Rig(n_slots=3)
    rig.run(*(drafted_job(text, max_tokens=100) for text in ("a", "b")))
    lengths = [[part.n_tokens for part in plan] for plan in rig.draft_model.plans]
    first = next(plan for plan in lengths if len(plan) == 2 and all(plan))
    assert max(first) <= 2
    assert max(max(plan) for plan in lengths) == 8


def test_a_long_history_is_computed_over_several_ticks_while_other_slots_get_drafts() -> None:
    rig, long = Rig(max_missing=20), drafted_job("p" * 300, max_tokens=100)
    short = drafted_job("Hello", max_tokens=400)
    rig.scheduler.submit(short)
    while rig.n_drafted < 20:
        rig.tick()
    n_plans = len(rig.draft_model.plans)
    rig.run(long)
    plans = rig.draft_model.plans[n_plans:]
    assert max(sum(part.n_missing for part in plan) for plan in rig.draft_model.plans) <= 20
    behind = [plan for plan in plans if any(not part.n_tokens for part in plan)]
    assert len(behind) >= 300 // 20
    assert sum(any(part.n_tokens for part in plan) for plan in behind) > len(behind) / 2
    of_long = [part for plan in plans for part in plan if len(part.slot.active.tokens if part.slot.run else ()) > 300]
    assert not of_long, "all jobs have ended"


def test_missing_tokens_take_no_longer_than_a_tick() -> None:
    rig = Rig(step_s=0.004, max_missing=2000)
    rig.run(drafted_job("p" * 500, max_tokens=600))
    per_tick = [sum(part.n_before_steps for part in plan) for plan in rig.draft_model.plans]
    assert max(per_tick) * rig.draft_model.missing_s <= 1.3 * TICK_S


def test_a_history_is_not_computed_for_an_output_that_is_too_short_to_gain_this_time() -> None:
    rig = Rig()
    rig.run(drafted_job())  # measures the draft model
    n_plans = len(rig.draft_model.plans)
    rig.run(drafted_job("p" * 500, max_tokens=10))
    assert len(rig.draft_model.plans) == n_plans


def test_without_cells_for_a_history_its_job_gets_no_drafts() -> None:
    rig = Rig(draft_cells=200)
    first, second = drafted_job("a" * 100, max_tokens=60), drafted_job("b" * 100, max_tokens=150)
    outputs = rig.run(first, second)
    assert tokens_of(outputs, first) == expected_tokens("a" * 100, 60)
    assert tokens_of(outputs, second) == expected_tokens("b" * 100, 150)
    assert {part.slot.index for plan in rig.draft_model.plans for part in plan} == {0, 1}, (
        "the second one gets its turn"
    )
    assert rig.n_drafted > 30
    too_long = drafted_job("c" * 300, max_tokens=60)
    n_plans = len(rig.draft_model.plans)
    assert tokens_of(rig.run(too_long), too_long) == expected_tokens("c" * 300, 60)
    assert not any(rig.draft_model.plans[n_plans:])


def test_the_next_job_of_a_slot_keeps_the_tokens_of_its_common_prefix() -> None:
    rig = Rig(n_slots=1)
    rig.run(drafted_job("x" * 60))
    n_plans = len(rig.draft_model.plans)
    rig.run(drafted_job("x" * 60 + "y", max_tokens=100))
    assert rig.draft_model.plans[n_plans][0].n_kept == 61
    assert rig.n_drafted > 100


@pytest.mark.parametrize(
    ("first", "second", "n_kept"),
    [
        (Scope(), Scope(), 61),
        (Scope("a"), Scope("a"), 61),
        (Scope("a"), Scope("b"), 0),
        (Scope("a", public=20), Scope("b", public=30), 20),
        (None, Scope(), 0),
        (Scope(), None, 0),
    ],
    ids=repr,
)
def test_a_job_uses_the_tokens_of_another_one_only_if_their_scopes_allow_it(
    first: Scope | None, second: Scope | None, n_kept: int
) -> None:
    rig = Rig(n_slots=1)
    rig.run(drafted_job("x" * 60, scope=first))
    n_plans = len(rig.draft_model.plans)
    rig.run(drafted_job("x" * 60 + "y", max_tokens=100, scope=second))
    parts = [part for plan in rig.draft_model.plans[n_plans:] for part in plan]
    assert parts[0].n_kept == n_kept
    assert max(part.n_missing for part in parts[2:]) <= 64, "its own tokens it may always use"


def test_slots_without_cells_take_no_drafts_from_slots_that_have_them() -> None:
    rig = Rig(n_slots=3, draft_cells=400, step_s=0.004, slot_s=0.01, is_measured=True)
    rig.run(*(drafted_job(text * 100, max_tokens=200) for text in "abc"))
    assert rig.n_drafted > 250, "172 if the gain counts drafts that cannot be made"


def test_a_slot_whose_drafts_fail_takes_no_cells_from_one_whose_drafts_are_right() -> None:
    rig = Rig(
        lambda history: right(history) if history[1] == ord("b") else WRONG,
        n_ctx=4000,
        draft_cells=1200,
        is_measured=True,
    )
    rig.run(drafted_job("b" * 50, max_tokens=200))
    wrong_job, right_job = drafted_job("a" * 600, max_tokens=1500), drafted_job("b" * 500, max_tokens=500)
    outputs: list[Output] = []
    rig.scheduler.submit(wrong_job)
    while len(tokens_of(outputs, wrong_job)) < 200:
        outputs += rig.tick()
    rig.scheduler.submit(right_job)
    while len(tokens_of(outputs, right_job)) < 500:
        outputs += rig.tick()
    assert len(tokens_of(outputs, wrong_job)) < 500, "700 if it takes the cells, so that no draft is made"


def test_a_run_that_generates_nothing_in_this_tick_keeps_its_cells() -> None:
    rig = Rig(n_slots=2)
    rig.scheduler.submit(drafted_job("x" * 60, max_tokens=300))
    rig.scheduler.submit(drafted_job("y" * 60, max_tokens=300))
    while rig.n_drafted < 100:
        rig.tick()
    assert rig.sequences.n_used > 200
    (first, second), n_used = rig.memory.active_slots, rig.sequences.n_used
    plan = rig.sequences.plan({first: 1}, [first], 64)
    assert plan.emptied == ()
    assert rig.sequences.n_used >= n_used
    second.run = None
    assert rig.sequences.plan({first: 1}, [first], 64).emptied == (second.index,)


def test_slots_that_generate_nothing_hold_few_cells() -> None:
    n_held = []
    for held_cells in (1000, 130):
        rig = Rig(n_slots=3, held_cells=held_cells)
        rig.run(drafted_job("x" * 60), drafted_job("y" * 20), drafted_job("z" * 60))
        rig.run(drafted_job("w"))
        n_held.append(sum(map(len, rig.draft_model.held.values())) - 62)
    assert n_held[0] > 200
    assert 0 < n_held[1] <= 130, "the sequences that were used last"


def test_sequences_are_emptied_also_if_no_other_sequence_gets_their_cells() -> None:
    rig = Rig(n_slots=2, draft_cells=200, held_cells=50, n_vocab=ord("z") + 1)
    known, unknown = (make_job([token] * 60, max_tokens=60, drafting=Drafting(None, 8)) for token in b"a~")
    rig.run(known)
    assert len(rig.draft_model.held[0]) > 50
    rig.run(unknown)  # the draft model does not have its tokens
    assert sum(map(len, rig.draft_model.held.values())) == rig.sequences.n_used < 50


def test_a_token_that_the_draft_model_does_not_have_leaves_its_job_without_drafts() -> None:
    rig = Rig(n_vocab=ord("z") + 1)
    known, unknown = (make_job(list(text), max_tokens=60, drafting=Drafting(None, 8)) for text in (b"a b", b"a ~ b"))
    outputs = rig.run(unknown)
    assert len(tokens_of(outputs, unknown)) == 60
    assert not rig.draft_model.plans
    rig.run(known)
    assert rig.n_drafted > 0


def test_after_a_failure_nothing_is_drafted_and_no_job_fails() -> None:
    rig, job = Rig(), drafted_job()
    rig.draft_model.fails_after = 3
    outputs = rig.run(job, drafted_job("Other"))
    assert tokens_of(outputs, job) == expected_tokens("Hello", 60)
    assert all(output.error is None for output in outputs if isinstance(output, JobEnded))
    assert len(rig.draft_model.plans) == 3
    assert rig.sequences.n_used == 0


def test_a_sequence_that_was_lost_is_computed_again() -> None:
    rig, job = Rig(), drafted_job(max_tokens=200)
    rig.scheduler.submit(job)
    outputs = []
    while rig.n_drafted < 20:
        outputs += rig.tick()
    rig.draft_model.losing = {0}
    outputs += rig.run()
    assert tokens_of(outputs, job) == expected_tokens("Hello", 200)
    assert rig.n_drafted > 100


def test_a_tick_with_drafts_keeps_the_limit_of_the_strategy() -> None:
    rig = Rig(limit_s=2 * TICK_S, is_measured=True)
    rig.run(drafted_job("p" * 100, max_tokens=300), drafted_job(max_tokens=300))
    known = rig.engine.batches[40:]
    assert any(batch.n_drafted for batch in known)
    times = [TICK_S + TOKEN_S * batch.n_drafted + batch.draft_work.seconds for batch in known]
    assert max(times) <= 2 * TICK_S * 1.01
    n_draft_model = 0
    for tick in rig.strategy.ticks[20:]:
        if tick.n_decode and not tick.n_prefill:
            assert tick.seconds - tick.draft_model_s == pytest.approx(TICK_S + TOKEN_S * tick.n_ahead)
            n_draft_model += tick.draft_model_s > 0
    assert n_draft_model > 20
    none = Rig(limit_s=0.0)
    none.run(drafted_job())
    assert not none.draft_model.plans


def test_jobs_that_are_preempted_cancelled_or_share_prefixes_get_their_tokens() -> None:
    random = Random(5)
    rig = Rig(lambda history: right(history) if len(history) % 7 else WRONG, n_slots=3, n_ctx=150, draft_cells=130)
    jobs = [
        drafted_job(random.choice(("shared ", "prefix ", "")) + "x" * random.randrange(50), max_tokens=50)
        for _ in range(24)
    ]
    outputs: list[Output] = []
    for job in jobs:
        rig.scheduler.submit(job)
    cancelled = set(random.sample(jobs, 5))
    while rig.scheduler.has_work:
        outputs += rig.tick()
        running = [job for job in cancelled if len(tokens_of(outputs, job)) > 10]
        for job in running:
            rig.scheduler.cancel(job.id)
            cancelled.remove(job)
    assert any(isinstance(output, SlotLost) for output in outputs)
    assert rig.n_drafted > 100
    for job in jobs:
        tokens = tokens_of(outputs, job)
        prompt = bytes(job.prompt[1:]).decode()
        assert tokens == expected_tokens(prompt, 50)[: len(tokens)]


def test_the_time_of_the_draft_model_is_no_time_of_decode_tokens() -> None:
    model = TickTimeModel()
    model.record(TickTime(2, 0, 0.01))
    model.record(TickTime(2, 0, 0.03, draft_model_s=0.02))
    assert model.decode_s(2) == pytest.approx(0.01)
