"""Jobs are cancelled in every state. Their slots are free within one tick, and jobs without a slot are not computed."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from tests.soak.chaos import VOCABULARY, JobShape, seeded_random
from tests.soak.checker import Checker
from tests.soak.environment import POLL_S, Environment
from tests.soak.load import WIRE, collect, read, record_published, run_jobs, submit
from tests.soak.report import Outcome, ProgressReport, percentiles

from llamaq.common.protocol.job_outcome import JobState
from llamaq.producer import AsyncClient, AsyncJob

QUEUED, WAITING, PREFILL, DECODE = STATES = ("queued", "waiting", "prefill", "decode")
"""States of a job: in the queue, claimed but without a slot, in a slot in prefill, and in a slot in decode."""
GONE = "gone"
TICK_S = 0.01
SETTINGS: dict[str, Any] = {"n_parallel": 3, "inbox_window": 2, "chunk_size": 16, "n_ctx": 4096}
WIDTH = 12
"""Number of open jobs. It exceeds the slots and the inbox window, so that some jobs wait in the queue."""
PROMPT_TOKENS = 400
"""Length of the prompts: 25 ticks of prefill."""
MAX_TOKENS = 60
PREFILL_S = 0.4


@dataclass(eq=False)
class Record:
    """The events that the worker recorded, and the figures computed from them."""

    lines: list[dict[str, Any]]
    computed: Counter[str] = field(default_factory=Counter)
    """Number of ticks that computed the job, by job id."""
    ticks_to_free: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Ticks between the arrival of a cancel at the engine and the release of the slot, by state."""
    not_freed: list[str] = field(default_factory=list)
    computed_after: list[str] = field(default_factory=list)
    """Jobs that were computed after their cancel was applied."""
    states: dict[str, str] = field(default_factory=dict)
    """State of each cancelled job when the scheduler applied the cancel."""

    def __post_init__(self) -> None:
        arrived: dict[str, int] = {}
        n_ticks = 0
        for line in self.lines:
            job_id = line.get("job", "")
            if line["what"] == "tick":
                n_ticks += 1
                self.computed.update(line["jobs"])
                self.computed_after += [one for one in line["jobs"] if self.states.get(one, GONE) != GONE]
            elif line["what"] == "cancel.arrived":
                arrived.setdefault(job_id, n_ticks)
            elif self.states.get(job_id, GONE) == GONE:
                self.states[job_id] = line["state"]
                self.ticks_to_free[line["state"]].append(n_ticks - arrived[job_id])
                if not line["freed"]:
                    self.not_freed.append(job_id)


@dataclass(eq=False)
class Canceller:
    """Submits jobs and cancels each in approximately its target state. Successive jobs have different targets."""

    client: AsyncClient
    checker: Checker
    rng: random.Random
    n_each: int
    target_states: Counter[str] = field(default_factory=Counter)
    never_claimed: set[str] = field(default_factory=set)
    """Jobs that were cancelled in the queue."""
    never_started: set[str] = field(default_factory=set)
    """Jobs that were cancelled after a worker had claimed them and before they had a slot."""
    ended_s: list[float] = field(default_factory=list)
    """Seconds from each cancel to the end of the job's stream."""

    def wants_more(self, n_begun: int, n_open: int) -> bool:
        return n_begun < self.n_each * len(STATES)

    async def one_job(self) -> None:
        target = STATES[self.target_states.total() % len(STATES)]
        self.target_states[target] += 1
        tokens = self.rng.choices(VOCABULARY, k=PROMPT_TOKENS)
        options = {"tokens": tokens, "max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": 1}
        job = await submit(
            self.client, self.checker, JobShape(options, demands={"n_tokens": MAX_TOKENS, "may_be_short": True})
        )
        reading = asyncio.create_task(read(job, self.checker, "reader"))
        await self._await_state(job, target)
        cancelled_s = time.monotonic()
        await job.cancel()
        await reading
        self.ended_s.append(time.monotonic() - cancelled_s)
        status = await job.status()
        if status.attempt == 0:
            self.never_claimed.add(job.id)
        elif status.started_ms is None:
            self.never_started.add(job.id)

    async def _await_state(self, job: AsyncJob, target: str) -> None:
        """Wait until the job is probably in this state. The worker records its exact state when it is cancelled."""
        if target == QUEUED:
            return
        while (status := await job.status()).state in (JobState.QUEUED, JobState.RUNNING):
            if target == WAITING and status.attempt:
                break
            if status.state is JobState.RUNNING and (target != DECODE or status.generated_tokens):
                break
            await asyncio.sleep(POLL_S)
        if target == PREFILL:
            await asyncio.sleep(self.rng.uniform(0, PREFILL_S))


async def cancels(seed: int, report: ProgressReport, *, n_each: int = 40) -> Outcome:
    """Cancel about `n_each` jobs in each of the four states."""
    checker, rng, started_s = Checker(), seeded_random(seed, "cancels"), time.monotonic()
    async with Environment(settings=SETTINGS) as environment:
        environment.use_random_model()
        file = environment.folder / "record.jsonl"
        await environment.start_ready(1, {"tick_s": TICK_S, "record": str(file)})
        async with environment.client() as client, record_published(client, checker):
            canceller = Canceller(client, checker, rng, n_each)

            async def one_job() -> None:
                await canceller.one_job()
                report(len(canceller.ended_s), n_each * len(STATES), "cancels")

            await run_jobs(one_job, width=WIDTH, wants_more=canceller.wants_more)
            await collect(client, checker)
        record = Record([json.loads(line) for line in file.read_text().splitlines()])
    return Outcome(
        "cancels", _judge(checker, canceller, record).judge(), _figures(canceller, record), time.monotonic() - started_s
    )


def _judge(checker: Checker, canceller: Canceller, record: Record) -> Checker:
    for job_id in canceller.never_claimed:
        if record.computed[job_id]:
            checker.add_violation(
                f"{job_id}: cancelled before a worker had claimed it, but computed in {record.computed[job_id]} ticks"
            )
    for job_id in canceller.never_claimed | canceller.never_started:  # a worker notices the end at its next flush
        if any(event.type == "tokens" for event in checker.events_of(job_id, WIRE)):
            checker.add_violation(f"{job_id}: cancelled before it had a slot, but tokens of it were published")
    for job_id in record.not_freed:
        checker.add_violation(f"{job_id}: still in its slot after its cancel")
    for job_id in record.computed_after:
        checker.add_violation(f"{job_id}: computed after its cancel was applied")
    for state in (PREFILL, DECODE):
        if max(record.ticks_to_free[state], default=0) > 1:
            checker.add_violation(f"{state}: a slot was free only after {max(record.ticks_to_free[state])} ticks")
    for state, count in _counts(canceller, record).items():
        if not count:
            checker.add_violation(f"no job was cancelled in state {state}")
    return checker


def _counts(canceller: Canceller, record: Record) -> dict[str, int]:
    states = Counter(record.states.values())
    waiting = {QUEUED: len(canceller.never_claimed), WAITING: len(canceller.never_started)}
    return waiting | {state: states[state] for state in (PREFILL, DECODE)}


def _figures(canceller: Canceller, record: Record) -> dict[str, Any]:
    return {
        "cancels by state": _counts(canceller, record),
        "most ticks from a cancel's arrival to a free slot": {
            state: max(record.ticks_to_free[state], default=0) for state in (PREFILL, DECODE)
        },
        "most ticks of a job that was cancelled before it had a slot": max(
            (record.computed[job_id] for job_id in canceller.never_started), default=0
        ),
        "from cancel() to the stream's end, s": percentiles(canceller.ended_s),
    }
