"""Constraints that are compiled while the prompts of their jobs are computed."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.support.grammars import constraint_of

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import TokenSpan
from llamaq.common.protocol.job_request import JobRequest, Priority
from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.core.job import Job, Lease, PreparedJob
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.generation.grammar.pending_constraint import PendingConstraint
from llamaq.worker.generation.grammar.sandbox import GrammarSandbox
from llamaq.worker.generation.grammar.token_constraint import TokenConstraint
from llamaq.worker.generation.grammar.token_set import TokenSet
from llamaq.worker.generation.job_preparer import JobPreparer
from llamaq.worker.generation.sampling.logit_sampler import LogitSampler
from llamaq.worker.settings import WorkerSettings

NO_OUTPUT = TokenSpan(0, (), 0, "")
DIGITS = 'root ::= [0-9]+ "."'


class Panic(BaseException):
    """What a panic of a library in Rust is in Python: no `Exception`."""


class SlowCompiler:
    """Compiles `DIGITS` when its event is set."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.n_calls = 0

    def compile(self) -> TokenConstraint:
        self.n_calls += 1
        self.has_begun.set()
        assert self.may_end.wait(timeout=60)
        return constraint_of(self._vocab, DIGITS)


def texts(vocab: Vocab, tokens: TokenSet) -> set[bytes]:
    return {vocab.piece(token) for token in tokens.ids().tolist()}


def test_a_constraint_is_compiled_once_and_all_calls_wait_for_it(vocab: Vocab) -> None:
    compiler = SlowCompiler(vocab)
    pending = PendingConstraint(compiler.compile)
    assert pending.n_accepted == 0
    with ThreadPoolExecutor(4) as threads:
        compilations = [threads.submit(pending.compile) for _ in range(2)]
        allowed = [threads.submit(pending.allowed_tokens) for _ in range(2)]
        assert compiler.has_begun.wait(timeout=60)
        assert not any(call.done() for call in compilations)
        assert not any(call.done() for call in allowed)
        compiler.may_end.set()
        assert all(texts(vocab, call.result()) >= {b"0", b"9"} for call in allowed)
    assert compiler.n_calls == 1


def test_a_constraint_that_no_thread_compiles_is_compiled_by_the_first_draw(vocab: Vocab) -> None:
    compiler = SlowCompiler(vocab)
    compiler.may_end.set()
    sampler = LogitSampler(SamplingDefaults(temperature=0), seed=1, grammar=PendingConstraint(compiler.compile))
    history: list[int] = []
    for _ in range(3):
        logits = np.random.default_rng(len(history)).normal(size=vocab.n_tokens).astype(np.float32)
        history.append(sampler.sample(logits, history, 0))
    assert b"".join(map(vocab.piece, history)).isdigit()
    assert compiler.n_calls == 1


def test_only_listed_tokens_are_allowed_also_if_the_list_came_first(vocab: Vocab) -> None:
    compiler = SlowCompiler(vocab)
    compiler.may_end.set()
    pending = PendingConstraint(compiler.compile)
    seven = next(token for token in range(vocab.n_tokens) if vocab.piece(token) == b"7")
    pending.restrict_to(TokenSet.of({seven, 5}, vocab.n_tokens))
    assert texts(vocab, pending.allowed_tokens()) == {b"7"}


@pytest.mark.parametrize("error", [JobRejected(ErrorCode.INVALID_GRAMMAR, "no root"), Panic("index out of bounds")])
def test_an_error_of_the_compilation_is_raised_where_the_constraint_is_needed(
    vocab: Vocab, error: BaseException
) -> None:
    def fail() -> TokenConstraint:
        raise error

    pending = PendingConstraint(fail)
    pending.compile()
    sampler = LogitSampler(SamplingDefaults(), seed=1, grammar=pending)
    sampler.prepare([1], 1, 1, ())
    expected = "no root" if isinstance(error, JobRejected) else "ended with Panic"
    for _ in range(2):
        with pytest.raises(type(error) if isinstance(error, JobRejected) else RuntimeError, match=expected):
            sampler.sample(np.zeros(vocab.n_tokens, np.float32), [1], 1)


@pytest.fixture
def preparer(vocab: Vocab, sandbox: GrammarSandbox) -> JobPreparer:
    return JobPreparer(vocab, sandbox, WorkerSettings().job_defaults, context_limit=512, max_request_bytes=100_000)


def prepare(preparer: JobPreparer, request: JobRequest, published: TokenSpan = NO_OUTPUT) -> PreparedJob:
    lease = Lease("q.0." + "0" * 32, 0, Keys().jobs("q", 0, Priority.INTERACTIVE), "1-0", 1)
    return preparer.prepare(codec.encode_request(request, 100_000), lease, published, JobTimes(0.0))


@pytest.mark.parametrize(
    "constraint",
    [{"json_schema": {"type": "integer"}}, {"regex": "[0-9]{3}"}, {"choice": ("12", "34")}, {"grammar": DIGITS}],
    ids=lambda one: next(iter(one)),
)
def test_a_constraint_that_compiles_quickly_is_compiled_after_the_job_is_prepared(
    preparer: JobPreparer, vocab: Vocab, constraint: dict[str, object]
) -> None:
    for n_repetitions in range(2):
        prepared = prepare(preparer, JobRequest(prompt="x", seed=n_repetitions, **constraint))
        job = prepared.job
        assert isinstance(job, Job)
        assert prepared.finish_preparation is not None
        if n_repetitions:
            prepared.finish_preparation()
        token = job.sampler.sample(np.zeros(vocab.n_tokens, np.float32), job.prompt, len(job.prompt))
        assert re.fullmatch(rb"-|-?[0-9]+", vocab.piece(token))


def test_a_job_that_draws_no_token_has_a_compiled_constraint(preparer: JobPreparer) -> None:
    prepared = prepare(preparer, JobRequest(prompt="x", seed=1, json_schema={"type": "integer"}, max_tokens=0))
    assert prepared.finish_preparation is None
    with pytest.raises(JobRejected, match="regex parse error"):
        prepare(preparer, JobRequest(prompt="x", seed=1, json_schema={"pattern": "("}, max_tokens=0))


def test_a_job_with_output_has_a_compiled_constraint(preparer: JobPreparer, vocab: Vocab) -> None:
    one = next(token for token in range(vocab.n_tokens) if vocab.piece(token) == b"1")
    published = TokenSpan(0, (one,), 0, "1")
    prepared = prepare(preparer, JobRequest(prompt="x", seed=1, json_schema={"type": "integer"}), published)
    assert prepared.finish_preparation is None


def test_a_constraint_that_takes_long_is_compiled_before_the_job_is_admitted(
    preparer: JobPreparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamaq.worker.generation.grammar.sandbox.QUICK_S", 0.0)
    assert prepare(preparer, JobRequest(prompt="x", seed=1, regex="[0-9]{4}")).finish_preparation is None
    with pytest.raises(JobRejected):
        prepare(preparer, JobRequest(prompt="x", seed=1, regex="("))


def test_a_plain_schema_that_does_not_compile_fails_with_the_first_draw(preparer: JobPreparer, vocab: Vocab) -> None:
    job = prepare(preparer, JobRequest(prompt="x", seed=1, json_schema={"type": "string", "pattern": "("})).job
    assert isinstance(job, Job)
    with pytest.raises(JobRejected, match="regex parse error") as refused:
        job.sampler.sample(np.zeros(vocab.n_tokens, np.float32), job.prompt, len(job.prompt))
    assert refused.value.code == ErrorCode.INVALID_GRAMMAR
