"""Preparing a job: from its request to the job of the engine."""

from __future__ import annotations

from unittest.mock import Mock

from llamaq.common.protocol import codec
from llamaq.common.protocol.job_request import JobRequest, Priority
from llamaq.common.protocol.keys import Keys
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.core.job import Lease
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.generation.grammar.sandbox import GrammarSandbox
from llamaq.worker.generation.job_preparer import JobPreparer
from llamaq.worker.settings import WorkerSettings


def test_a_job_has_the_priority_of_its_stream(vocab: Vocab) -> None:
    sandbox = Mock(spec=GrammarSandbox)  # a job without a grammar does not need it
    defaults = WorkerSettings().job_defaults
    preparer = JobPreparer(vocab, sandbox, defaults, context_limit=512, max_request_bytes=10_000)
    for priority in Priority:
        request = JobRequest(prompt="x", seed=1, priority=Priority.INTERACTIVE)
        lease = Lease("q.0." + "0" * 32, 0, Keys().jobs("q", 0, priority), "1-0", 1)
        prepared = preparer.prepare(codec.encode_request(request, 10_000), lease, [], JobTimes(0.0))
        assert prepared.job.request.priority is priority
        prepared.job.sampler.close()
