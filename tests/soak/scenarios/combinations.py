"""Many settings and job options are combined: each token is that of a replay without other jobs and without caches.

Each round has a random kind of model and random settings. Its jobs are cancelled at random, lose their leases, and
lose their worker. The next worker continues them with other settings, and with the same cache folder.
"""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.chaos import seeded_random
from tests.soak.checker import Verdict
from tests.soak.combinations.job_draws import JobDraws
from tests.soak.combinations.local_worker import LocalWorker
from tests.soak.combinations.replay import Replay
from tests.soak.combinations.setting_draws import SPECS, Settings, draw_settings, write_model_files
from tests.soak.combinations.tracked_job import TrackedJob, job_of
from tests.soak.report import Outcome, ProgressReport

from llamaq.common.errors import ErrorCode, JobRejected, LlamaqError
from llamaq.common.protocol.job_request import JobRequest
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import JobEnded, NewToken, PromptScored
from llamaq.worker.engine_loop.output_mailbox import JobWithdrawn, Message
from llamaq.worker.settings import load_settings

N_JOBS = 30
ROUND_TIMEOUT_S = 90.0
LIFETIMES_S = (0.1, 0.3, 0.8)
"""How long a worker that dies may run."""
PAUSES_S = (0.0, 0.0005, 0.002, 0.01)
GRAMMAR_SHARE = 0.3
"""Share of the rounds in which some jobs have a grammar. Each worker of such a round starts a process."""
REFUSALS = (ErrorCode.PROMPT_TOO_LONG, ErrorCode.INVALID_REQUEST)
"""The errors of jobs that ask for too much: a prompt longer than the context, or a slot that does not exist."""
USUAL_WARNINGS = ("disk_cache.ignored",)
"""Parts of warnings that a cache with too little room may log. The tokens are computed again."""


async def combinations(
    seed: int,
    report: ProgressReport,
    *,
    n_rounds: int = 60,
    n_jobs: int = N_JOBS,
    grammar_share: float = GRAMMAR_SHARE,
) -> Outcome:
    """Run `n_rounds` rounds of `n_jobs` jobs. In a share of the rounds, some jobs have a grammar."""
    started_s, verdict, figures = time.monotonic(), Verdict(), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="lq-soak-") as folder:
        for number in range(n_rounds):
            name = f"combinations {number}"
            rng = seeded_random(seed, name)
            one = Round(rng, Path(folder), rng.choice(list(SPECS)), n_jobs, grammar_share)
            for fault in await asyncio.to_thread(one.run):
                verdict.others.append(f"round {number} {one.kind} {one.settings}: {fault}")
            verdict.n_jobs += len(one.jobs)
            figures += one.figures
            report(number + 1, n_rounds, one.kind)
    verdict.n_readings, verdict.n_tokens = verdict.n_jobs, figures["replayed tokens"]
    return Outcome("combinations", verdict, dict(figures), time.monotonic() - started_s)


@dataclass(eq=False)
class Round:
    """The workers and the jobs of a round."""

    rng: random.Random
    folder: Path
    kind: str
    n_jobs: int
    grammar_share: float
    settings: list[Settings] = field(default_factory=list)
    """The settings of the workers, in the order of their starts."""
    jobs: dict[str, TrackedJob] = field(default_factory=dict)
    context_limits: list[int] = field(default_factory=list)
    """The largest number of tokens of a job in each of these workers."""
    figures: Counter[str] = field(default_factory=Counter)

    def run(self) -> list[str]:
        """Run the round and return the faults that it finds."""
        self._files = write_model_files(self.folder, self.kind)
        with tempfile.TemporaryDirectory(dir=self.folder) as cache_dir, recorded_warnings() as warnings:
            self._cache_dir = Path(cache_dir)
            try:
                self._run_workers()
            except Exception as exc:  # noqa: BLE001 - a defect of the worker is a fault of this round
                return ["".join(traceback.format_exception(exc))]
        faults = [warning for warning in warnings if not any(usual in warning for usual in USUAL_WARNINGS)]
        return faults + list(self._faults_of_jobs())

    def _run_workers(self) -> None:
        self._worker = self._start_worker()
        vocab = self._worker.parts.engine.vocab
        has_grammars = self.rng.random() < self.grammar_share
        first = self.settings[0]
        n_adapters = len(first.get("lora", ()))
        self._draws = JobDraws(
            self.rng, first["n_ctx"], vocab.n_tokens, n_adapters=n_adapters, has_grammars=has_grammars
        )
        try:
            for _ in range(self.rng.choice([0, 0, 1, 2])):
                self._run_jobs(self.rng.choice(LIFETIMES_S), dies=True)
                self._worker.close()
                self._lose_outputs()
                self._worker = self._start_worker()
            self._run_jobs(ROUND_TIMEOUT_S)
            self._worker.check_idle()
        finally:
            self._worker.close()

    def _start_worker(self) -> LocalWorker:
        while True:
            first = self.settings[0] if self.settings else None
            drawn = draw_settings(self.rng, self._files, self._cache_dir, first)
            try:
                worker = LocalWorker(self._files.model, load_settings(**drawn))
            except LlamaqError:
                self.figures["refused settings"] += 1
                continue
            self.figures["workers"] += 1
            self.settings.append(drawn)
            self.context_limits.append(worker.parts.card_fields()["context_limit"])
            return worker

    # ---- jobs

    def _run_jobs(self, seconds: float, *, dies: bool = False) -> None:
        deadline_s = time.monotonic() + seconds
        while len(self.jobs) < self.n_jobs or not all(job.is_done for job in self.jobs.values()):
            self._take_messages()
            self._submit()
            self._disturb()
            time.sleep(self.rng.choice(PAUSES_S))
            if time.monotonic() > deadline_s:
                assert dies, f"jobs do not end: {self._open} {self._worker.parts.scheduler!r}"
                return

    @property
    def _open(self) -> list[TrackedJob]:
        """The jobs that the worker has."""
        return [job for job in self.jobs.values() if job.lease is not None]

    def _submit(self) -> None:
        """Give the worker as many jobs as it would claim: first interrupted ones, then new ones."""
        n_free = self._worker.capacity - len(self._open)
        chosen = [job for job in self.jobs.values() if job.lease is None and not job.is_done][: max(0, n_free)]
        while len(chosen) < n_free and len(self.jobs) < self.n_jobs:
            twin = chosen[-1].request if chosen and self.rng.random() < 0.2 else None
            chosen.append(self._new_job(self._draws.draw(twin)))
        self._admit(chosen)

    def _new_job(self, request: JobRequest) -> TrackedJob:
        job = TrackedJob(f"combinations.0.{len(self.jobs):032x}", request)
        self.jobs[job.id] = job
        return job

    def _admit(self, chosen: list[TrackedJob]) -> None:
        prepared: list[Job] = []
        for tracked in chosen:
            tracked.n_attempts += 1
            try:
                job = job_of(tracked.prepare(self._worker.parts.preparer))
            except JobRejected as exc:
                tracked.refusal = exc.code
                continue
            tracked.lease, tracked.prompt = job.lease, job.prompt
            prepared.append(job)
        self._worker.ticks.admit(prepared)

    def _disturb(self) -> None:
        """Cancel a job, or let its lease move to another attempt, now and then. Check the records of the worker."""
        what = self.rng.random()
        if self._open and what < 0.035:
            tracked = self.rng.choice(self._open)
            if what < 0.02:
                tracked.is_cancelled = True
                self._worker.ticks.cancel(tracked.id)
            elif what < 0.03 and tracked.lease is not None:
                self._worker.ticks.release(tracked.lease)
                tracked.lease = None
            elif not tracked.is_cancelled:
                self._admit([tracked])  # replaces the attempt that runs
        elif what > 0.9 or self._worker.error is not None:
            self._worker.check_integrity()

    def _take_messages(self) -> None:
        for message in self._worker.take_messages():
            self._take(message)

    def _take(self, message: Message) -> None:
        tracked = self.jobs[message.job.id]
        if message.job.lease is not tracked.lease:
            return  # of an attempt that has lost its lease
        assert not tracked.is_done, f"{message!r} after the end of {tracked!r}"
        if isinstance(message, NewToken):
            tracked.published.append(message)
        elif isinstance(message, PromptScored):
            assert not tracked.published, f"{message!r} after the first token of {tracked!r}"
            tracked.prompt_logprobs = message.prompt_logprobs
        elif isinstance(message, JobEnded):
            tracked.end, tracked.lease = message, None
            self._draws.histories.append([*tracked.prompt, *tracked.tokens])
        elif isinstance(message, JobWithdrawn):
            tracked.lease = None

    def _lose_outputs(self) -> None:
        """Forget what the dead worker has not published: the last tokens of some jobs."""
        self._take_messages()
        for tracked in self._open:
            tracked.lease = None
            if self.rng.random() < 0.5:
                tracked.lose_after(self.rng.randint(0, len(tracked.published)))
            elif not tracked.published:
                tracked.lose_after(0)

    # ---- what must hold

    def _faults_of_jobs(self) -> Iterator[str]:
        replay = Replay(self._files.model, self.settings[0])
        for tracked in self.jobs.values():
            error = tracked.end.error if tracked.end else None
            if (code := error.code if error else tracked.refusal) is not None:
                if code not in REFUSALS:
                    yield f"{tracked!r} failed with {code}: {error}"
                self.figures["refused jobs"] += 1
                continue
            if tracked.reason is not None:
                self.figures[f"ended by {tracked.reason.value}"] += 1
            yield from (f"{tracked!r}: {fault}" for fault in replay.faults_of(tracked, self.context_limits))
        self.figures["replayed tokens"] += replay.n_tokens
        self.figures["near ties"] += replay.n_near_ties
        self.figures["scores of prompts"] += replay.n_scores
        replay.close()


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Yield a list to which the warnings and errors of llamaq are appended."""
    found: list[str] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(f"{record.levelname} {self.format(record)}")

    recorder, logger = Recorder(logging.WARNING), logging.getLogger("llamaq")
    logger.addHandler(recorder)
    try:
        yield found
    finally:
        logger.removeHandler(recorder)
