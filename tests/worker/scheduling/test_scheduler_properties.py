"""Random operations: every job ends exactly once, and generates the same tokens as a job that runs alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.worker.core.batch import Batch, DecodeToken, PrefillChunk
from llamaq.worker.core.draft import Draft, Drafting
from llamaq.worker.core.finish_rules import ALL_NAN
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import JobEnded, NewToken
from llamaq.worker.core.slot import Slot
from llamaq.worker.plugins import BUILT_IN
from llamaq.worker.scheduling.strategies.batch_strategies import BatchStrategy
from llamaq.worker.testing import (
    ByteVocab,
    FakeEngine,
    GreedySampler,
    ManualClock,
    make_job,
    make_memory,
    make_scheduler,
    next_letter,
    run_tick,
)

N_CTX = 96
CONTEXT_LIMIT = 80


def letter_or_end(history: Sequence[int]) -> int:
    """Return the next letter, but an end token where the next letter is q."""
    letter = next_letter(history)
    return ByteVocab.eos if letter == ord("q") else letter


class FaultyStrategy:
    """A strategy whose batches are sometimes correct, and otherwise break one of several rules."""

    def __init__(self) -> None:
        self._turn = 0

    def build_batch(self, slots: Sequence[Slot], budget: int, chunk_size: int, *, queue_depth: int) -> Batch:
        self._turn += 1
        match self._turn % 7:
            case 0:
                return Batch()
            case 1:
                raise RuntimeError("no plan")
            case 2:
                return Batch(tuple(DecodeToken(slot) for slot in slots))
            case 3:
                return Batch((), tuple(PrefillChunk(slot, chunk_size * 2) for slot in slots))
            case 4:
                slots[0].run = None
            case 5:
                return BUILT_IN["balanced"]().build_batch(slots, 10**6, 10**6, queue_depth=queue_depth)
        return BUILT_IN["prefill-priority"]().build_batch(slots, budget, chunk_size, queue_depth=queue_depth)


STRATEGIES: dict[str, type[BatchStrategy]] = {**BUILT_IN, "faulty": FaultyStrategy}


def generated_alone(job: Job, n_tokens: int) -> list[int]:
    """Return the tokens that a loop without a scheduler generates: `n_tokens`, or fewer up to an end token."""
    history = list(job.prompt)
    while len(history) < len(job.prompt) + n_tokens:
        history.append(letter_or_end(history))
        if history[-1] == ByteVocab.eos:
            break
    return history[len(job.prompt) :]


class LetterDrafter:
    """Knows the tokens that follow, but drafts another letter at random places."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def propose(self, history: Sequence[int], n_max: int) -> Draft:
        tokens: list[int] = []
        for _ in range(self._random.randint(0, n_max)):
            is_wrong = self._random.random() < 0.2
            tokens.append(ord("?") if is_wrong else letter_or_end([*history, *tokens]))
        return Draft(tuple(tokens), self._random.randint(0, 2))


@dataclass(frozen=True)
class JobRecipe:
    """The parameters of a random job."""

    n_prompt: int
    n_resumed: int
    fails_at: int | None
    draft_max: int
    params: dict[str, object]

    def make(self) -> Job:
        prompt = [(self.n_prompt + at) % 256 for at in range(self.n_prompt)]
        resumed = generated_alone(make_job(prompt), self.n_resumed) if prompt else []
        return make_job(
            prompt,
            resumed=[token for token in resumed if token != ByteVocab.eos],
            context_limit=CONTEXT_LIMIT,
            sampler=GreedySampler(self.fails_at),
            drafting=Drafting(LetterDrafter(self.n_prompt), self.draft_max) if self.draft_max else None,
            **self.params,  # type: ignore[arg-type]
        )


JOB_RECIPES = st.builds(
    JobRecipe,
    n_prompt=st.one_of(st.integers(1, 40), st.integers(0, 90)),
    n_resumed=st.sampled_from([0, 0, 0, 1, 6]),
    fails_at=st.sampled_from([None, None, None, 0, 4]),
    draft_max=st.sampled_from([0, 0, 1, 5, 20]),
    params=st.fixed_dictionaries(
        {
            "max_tokens": st.one_of(st.none(), st.integers(1, 60)),
            "priority": st.sampled_from(["interactive", "bulk"]),
            "timeout_s": st.sampled_from([None, None, 3.0]),
            "stop": st.sampled_from([[], [], ["ab", "m"], ["z"]]),
        }
    ),
)


class Jobs(RuleBasedStateMachine):
    """Applies random operations to a scheduler."""

    submitted = Bundle("submitted")

    @initialize(
        strategy=st.sampled_from(sorted(STRATEGIES)),
        n_slots=st.integers(1, 4),
        chunk_size=st.sampled_from([1, 5, 32]),
        margin=st.sampled_from([1, 8, 40]),
        bulk_share=st.sampled_from([0.0, 0.1, 0.5]),
    )
    def start(self, strategy: str, n_slots: int, chunk_size: int, margin: int, bulk_share: float) -> None:
        self.engine = FakeEngine(n_ctx=N_CTX, n_batch=24, n_seq_max=n_slots + 3, next_token=letter_or_end)
        self.clock = ManualClock()
        self.scheduler = make_scheduler(
            self.engine,
            make_memory(self.engine, n_slots=n_slots, margin=margin),
            strategy=STRATEGIES[strategy](),
            chunk_size=chunk_size,
            bulk_share=bulk_share,
            draft_tokens=20,
            clock=self.clock,
        )
        self.jobs: dict[str, Job] = {}
        self.generated: dict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, JobEnded] = {}
        self.released: set[str] = set()

    # ---- operations

    @rule(target=submitted, recipes=st.lists(JOB_RECIPES, min_size=1, max_size=4))
    def submit(self, recipes: list[JobRecipe]) -> object:
        jobs = [recipe.make() for recipe in recipes]
        for job in jobs:
            self.jobs[job.id] = job
            self.generated[job.id] = list(job.generated_before)
            self.scheduler.submit(job)
        return multiple(*(job.id for job in jobs))

    @rule(times=st.integers(1, 12), repeats=st.sampled_from([0, 1, 5, 60]))
    def tick(self, times: int, repeats: int) -> None:
        for _ in range(times):
            self.collect_outputs(repeats)

    @rule(job_id=submitted)
    def cancel(self, job_id: str) -> None:
        gone = job_id in self.released or job_id in self.ends or self.has_uncollected_end(job_id)
        assert self.scheduler.cancel(job_id) is not gone

    @rule(job_id=submitted)
    def release(self, job_id: str) -> None:
        if self.scheduler.release(self.jobs[job_id].lease):
            self.released.add(job_id)

    @rule(job_id=submitted, n_more=st.integers(0, 1))
    def claim_again(self, job_id: str, n_more: int) -> None:
        """Submit another attempt of the job, as a worker does after it lost the lease and claimed the job again.

        After a failover that lost the claim, Redis gives the new attempt the same number.
        """
        if job_id in self.ends or job_id in self.released or self.has_uncollected_end(job_id):
            return
        old = self.jobs[job_id]
        self.jobs[job_id] = job = make_job(
            old.prompt,
            job_id=job_id,
            attempt=old.lease.attempt + n_more,
            resumed=self.generated[job_id],
            context_limit=CONTEXT_LIMIT,
            drafting=old.drafting,
            **old.request.model_dump(exclude={"prompt"}),
        )
        self.scheduler.submit(job)

    @rule(job_id=submitted, n_past=st.integers(0, 40))
    def lose_cells(self, job_id: str, n_past: int) -> None:
        self.engine.lose_cells(job_id, n_past)

    @rule()
    def refuse_a_batch(self) -> None:
        self.engine.refuse()

    @rule(job_id=submitted)
    def fail_a_job(self, job_id: str) -> None:
        self.engine.fail_job(job_id)

    @rule(job_id=submitted)
    def spoil_cells(self, job_id: str) -> None:
        self.engine.spoil_cells(job_id)

    @precondition(lambda self: not self.scheduler._faulty_job_search._suspects)  # then only one job writes cells
    @rule()
    def find_spoiled_cells(self) -> None:
        self.engine.sequences.is_spoiled = True

    @rule(seconds=st.floats(0, 4))
    def advance_the_clock(self, seconds: float) -> None:
        self.clock.now_s += seconds

    # ---- invariants

    def has_uncollected_end(self, job_id: str) -> bool:
        return any(isinstance(output, JobEnded) and output.job.id == job_id for output in self.scheduler._outputs)

    def collect_outputs(self, repeats: int = 0) -> None:
        for output in run_tick(self.scheduler, self.engine, repeats=repeats):
            job_id = output.job.id
            assert job_id not in self.ends, "an output comes after the end of its job"
            if isinstance(output, NewToken):
                self.generated[job_id].append(output.token)
            elif isinstance(output, JobEnded):
                self.ends[job_id] = output
                self.check_end(output)

    def check_end(self, end: JobEnded) -> None:
        job, generated = end.job, self.generated[end.job.id]
        assert isinstance(job, Job)
        assert (end.reason is None) != (end.error is None)
        assert end.stats.generated_tokens == len(generated)
        if end.error is not None and end.error.message == ALL_NAN:
            assert self.engine.is_spoiling(job.id), "a job fails that is not the cause"
        if end.reason is FinishReason.LENGTH:
            assert len(job.prompt) + len(generated) >= job.max_length
        if end.reason is not FinishReason.STOP:
            return
        if job.detokenizer.stop_string is None:
            assert generated_alone(job, len(generated) + 1) == [*generated, ByteVocab.eos]
        elif not job.generated_before:
            assert not any(stop in ByteVocab().decode(generated[:-1]) for stop in job.request.stop)

    @invariant()
    def every_job_generates_the_same_tokens_as_alone(self) -> None:
        for job_id, generated in self.generated.items():
            assert generated == generated_alone(self.jobs[job_id], len(generated))

    @invariant()
    def only_running_jobs_hold_cells(self) -> None:
        self.scheduler.check_integrity()
        n_running = sum(snapshot.job_id is not None for snapshot in self.scheduler.snapshot())
        assert len(self.engine.sequences.memory) <= n_running

    @rule()
    def let_all_jobs_end(self) -> None:
        # Each tick computes at least one token of a job. Preempted jobs compute some tokens twice. All running jobs
        # compute their tokens again when spoiled cells are found, and once more when the faulty job is found.
        work = sum(job.max_length for job in self.jobs.values())
        n_searches = 1 + sum(map(self.engine.is_spoiling, self.jobs))
        n_again = 2 * n_searches * len(self.scheduler.snapshot()) * CONTEXT_LIMIT
        for _ in range(2 * work + len(self.jobs) + 200 + n_again):
            if not self.scheduler.has_work:
                break
            self.collect_outputs()
        assert not self.scheduler.has_work
        assert set(self.jobs) == set(self.ends) | self.released
        assert not self.engine.sequences.memory

    def teardown(self) -> None:
        if hasattr(self, "jobs"):
            self.let_all_jobs_end()


Jobs.TestCase.settings = settings(
    max_examples=2 * settings().max_examples,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestJobs = Jobs.TestCase
