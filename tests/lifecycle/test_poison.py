"""A job that kills its workers becomes a dead letter. The other jobs finish."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from llamaq.producer import JobFailed

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Environment

POISONED = """
import os
import signal

from llamaq.worker.engine.engine import Engine
from llamaq.worker.scheduling.strategies.batch_strategies import DecodeMaximal

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

        # The last worker that died ran no other job: the poison job was a suspect.
        last_run = worker.output.rpartition("job.suspect")[2].partition("child.died")[0]
        assert set(re.findall(r"job\.admitted id=(\S+)", last_run)) == {poison.id}
