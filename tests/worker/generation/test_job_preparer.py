"""Preparing a job: from its request to the job of the engine."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest

from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import TokenSpan
from llamaq.common.protocol.job_request import JobRequest, Priority
from llamaq.common.protocol.keys import Keys
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.core.job import Job, Lease
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.generation.grammar.sandbox import GrammarSandbox
from llamaq.worker.generation.job_preparer import JobPreparer
from llamaq.worker.settings import WorkerSettings


def prepare(vocab: Vocab, request: JobRequest, priority: Priority = Priority.INTERACTIVE) -> Job:
    sandbox = Mock(spec=GrammarSandbox)  # a job without a grammar does not need it
    defaults = WorkerSettings().job_defaults
    preparer = JobPreparer(vocab, sandbox, defaults, context_limit=512, max_request_bytes=10_000)
    lease = Lease("q.0." + "0" * 32, 0, Keys().jobs("q", 0, priority), "1-0", 1)
    payload = codec.encode_request(request, 10_000)
    job = preparer.prepare(payload, lease, TokenSpan(0, (), 0, ""), JobTimes(0.0)).job
    assert isinstance(job, Job)
    return job


def test_a_job_has_the_priority_of_its_stream(vocab: Vocab) -> None:
    for priority in Priority:
        job = prepare(vocab, JobRequest(prompt="x", seed=1, priority=Priority.INTERACTIVE), priority)
        assert job.request.priority is priority


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_suppressed_token_is_never_drawn(vocab: Vocab, monkeypatch: pytest.MonkeyPatch, ignore_eos: bool) -> None:
    best, second = 300, 301
    logits = np.zeros(vocab.n_tokens, np.float32)
    logits[best], logits[second] = 9, 8
    request = JobRequest(prompt="x", seed=1, temperature=0, ignore_eos=ignore_eos)
    assert prepare(vocab, request).sampler.sample(logits.copy(), [1], 1) == best
    monkeypatch.setitem(vocab.__dict__, "suppressed_tokens", frozenset({best}))
    assert prepare(vocab, request).sampler.sample(logits.copy(), [1], 1) == second


def test_the_text_has_control_tokens_on_request(vocab: Vocab) -> None:
    tokens = vocab.encode("<|user|>hi")
    texts = [
        "".join(map(prepare(vocab, JobRequest(prompt="x", seed=1, special=special)).detokenizer.feed, tokens))
        for special in (False, True)
    ]
    assert texts == ["hi", "<|bos|><|user|>hi"]
