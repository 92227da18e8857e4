"""A job that kills its workers becomes a dead letter. The other jobs finish."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from llamaq.common.protocol.job_events import Started
from llamaq.producer import Job, JobFailed

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Environment

POISONED = """
import os
import signal

from llamaq.worker.engine.engine import Engine
from llamaq.worker.scheduling.batch_strategy import DecodeMaximal

run = Engine.run

def run_or_die(self, batch):
    if any("kills" in part.slot.active.job.request.metadata for part in batch.parts):
        DIE
    return run(self, batch)

Engine.run = run_or_die

class Poisoned(DecodeMaximal):
    pass
"""
"""A strategy whose import makes the engine die when it computes a job with the metadata `kills`."""
N_JOBS = 20


def attempts_of(environment: Environment, job: Job) -> list[str]:
    return [event.worker for event in environment.events_of(job) if isinstance(event, Started)]


@pytest.mark.parametrize("die", ["os.kill(os.getpid(), signal.SIGKILL)", "raise RuntimeError('a defect')"])
def test_one_poison_job_among_20_becomes_a_dead_letter_and_the_others_finish(
    environment: Environment, die: str
) -> None:
    (environment.folder / "poisoned.py").write_text(POISONED.replace("DIE", die))
    with environment.client() as client:
        jobs = [client.submit("Once upon a time", max_tokens=20, ignore_eos=True, seed=seed) for seed in range(N_JOBS)]
        jobs.insert(5, client.submit("Once upon a time", metadata={"kills": True}))
        poison = jobs[5]
        variables = environment.worker_variables(LLAMAQ_BATCH_STRATEGY="poisoned:Poisoned")
        worker = environment.start("worker", "--supervise", "--n-parallel", "4", **variables)

        with pytest.raises(JobFailed, match="3 workers died with this job") as caught:
            poison.result()
        assert caught.value.code == "poison"
        for job in jobs:
            if job is not poison:
                assert len(job.result().tokens) == 20
                assert job.status().crashes < 3
        (letter,) = client.dead_letters()
        assert letter.job_id == poison.id
        assert len(set(letter.workers)) == 3
        assert worker.output.count("child.died") == 3

        assert tuple(attempts_of(environment, poison)) == letter.workers
        # Jobs that ran in the last worker before the poison job also finished there: none was in its batch.
        last = [job for job in jobs if letter.workers[-1] == attempts_of(environment, job)[-1]]
        assert all(job is poison or job.result(timeout=60).stats.worker == letter.workers[-1] for job in last)
