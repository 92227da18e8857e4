"""Preparing a job: from its request to the job of the engine."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import TokenSpan
from llamaq.common.protocol.job_request import JobRequest, Priority
from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.output_params import CONSTRAINTS
from llamaq.common.protocol.prompt_logprobs import PromptLogprobs
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.core.job import Job, Lease, PreparedJob
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.generation.grammar.sandbox import GrammarSandbox
from llamaq.worker.generation.job_preparer import JobPreparer
from llamaq.worker.settings import WorkerSettings

NO_OUTPUT = TokenSpan(0, (), 0, "")


def prepare(
    vocab: Vocab, request: JobRequest, priority: Priority = Priority.INTERACTIVE, published: TokenSpan = NO_OUTPUT
) -> Job:
    job = prepare_attempt(vocab, request, priority, published).job
    assert isinstance(job, Job)
    return job


def prepare_attempt(
    vocab: Vocab, request: JobRequest, priority: Priority = Priority.INTERACTIVE, published: TokenSpan = NO_OUTPUT
) -> PreparedJob:
    sandbox = Mock(spec=GrammarSandbox)  # a job without a grammar does not need it
    defaults = WorkerSettings().job_defaults
    preparer = JobPreparer(vocab, sandbox, defaults, context_limit=512, max_request_bytes=10_000)
    lease = Lease("q.0." + "0" * 32, 0, Keys().jobs("q", 0, priority), "1-0", 1)
    payload = codec.encode_request(request, 10_000)
    return preparer.prepare(payload, lease, published, JobTimes(0.0))


def test_short_requests_without_a_grammar_are_quick_to_prepare(vocab: Vocab) -> None:
    def is_quick(request: JobRequest, **defaults: object) -> bool:
        settings = WorkerSettings().job_defaults.model_copy(update=defaults)
        preparer = JobPreparer(vocab, Mock(spec=GrammarSandbox), settings, context_limit=512, max_request_bytes=10_000)
        return preparer.is_quick(codec.encode_request(request, 10_000))

    plain = JobRequest(prompt="x", seed=1)
    assert is_quick(plain)
    assert not is_quick(JobRequest(prompt="x" * 1100))
    assert not is_quick(plain, grammar='root ::= "a"')
    assert not is_quick(plain, dry_multiplier=0.5)
    constraints = {"grammar": "g", "json_schema": {}, "regex": "r", "choice": ("c",), "lark": "l"}
    assert set(constraints) == set(CONSTRAINTS)
    slow = constraints | {"dry_multiplier": 0.5, "chat_template_kwargs": {"n": 10**9}}
    for name, value in slow.items():
        assert not is_quick(plain.model_copy(update={name: value})), name


def test_a_request_without_sampling_parameters_takes_the_defaults_without_a_copy() -> None:
    defaults = WorkerSettings().job_defaults
    plain, cold = JobRequest(prompt="x", seed=1, top_k=None), JobRequest(prompt="x", seed=1, temperature=0.0)
    assert defaults.resolve(plain) is defaults
    assert defaults.complete(plain) is plain
    assert defaults.resolve(cold).temperature == 0.0
    assert (
        defaults.model_copy(update={"seed": 5}).complete(plain.model_copy(update={"has_random_seed": True})).seed == 5
    )


def test_a_job_has_the_priority_of_its_stream(vocab: Vocab) -> None:
    for priority in Priority:
        job = prepare(vocab, JobRequest(prompt="x", seed=1, priority=Priority.INTERACTIVE), priority)
        assert job.request.priority is priority


def test_a_resumed_job_draws_as_if_it_had_not_been_interrupted(vocab: Vocab) -> None:
    request = JobRequest(prompt="x", seed=1, mirostat=2, mirostat_tau=1, mirostat_eta=0.9)
    logits = np.random.default_rng(1).normal(size=vocab.n_tokens).astype(np.float32) * 3
    first, history, draws = prepare(vocab, request).sampler, [1], list[float]()
    for _ in range(8):
        history.append(first.sample(logits.copy(), history, 1))
        draws.append(first.draw_probability or 0)
    published = TokenSpan(0, tuple(history[1:6]), 0, "", draws=tuple(draws[:5]))
    attempt = prepare_attempt(vocab, request, published=published)
    assert attempt.draws == draws[:5]
    resumed = attempt.job
    assert isinstance(resumed, Job)
    for n in range(6, 9):
        assert resumed.sampler.sample(logits.copy(), history[:n], 1) == history[n]
        assert resumed.sampler.draw_probability == draws[n - 1]


def test_sequence_breakers_of_dry_end_repetitions(vocab: Vocab) -> None:
    tokens = vocab.encode("a b c a b")[1:]
    logits = np.zeros(vocab.n_tokens, np.float32)
    logits[tokens[2]] = 1  # " c", which would extend a repetition
    request = JobRequest(prompt="x", seed=1, temperature=0, dry_multiplier=5, dry_allowed_length=1)
    assert prepare(vocab, request).sampler.sample(logits.copy(), tokens, 1) != tokens[2]
    broken = request.model_copy(update={"dry_sequence_breakers": ("b",)})
    assert prepare(vocab, broken).sampler.sample(logits.copy(), tokens, 1) == tokens[2]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_suppressed_token_is_never_drawn(vocab: Vocab, monkeypatch: pytest.MonkeyPatch, ignore_eos: bool) -> None:
    best, second = 300, 301
    logits = np.zeros(vocab.n_tokens, np.float32)
    logits[best], logits[second] = 9, 8
    request = JobRequest(prompt="x", seed=1, temperature=0, ignore_eos=ignore_eos)
    assert prepare(vocab, request).sampler.sample(logits.copy(), [1], 1) == best
    monkeypatch.setitem(vocab.__dict__, "suppressed_tokens", frozenset({best}))
    assert prepare(vocab, request).sampler.sample(logits.copy(), [1], 1) == second


@pytest.mark.parametrize(
    ("options", "is_drawn"),
    [
        ({}, True),
        ({"ignore_eos": True}, False),
        ({"ignore_eos": True, "stop_token_ids": "end"}, True),
        ({"min_tokens": 1}, False),
        ({"min_tokens": 1, "published": (5,)}, True),
        ({"allowed_token_ids": [300]}, False),
        ({"allowed_token_ids": [300], "stop_token_ids": "end"}, False),
        ({"allowed_token_ids": "end"}, True),
    ],
    ids=repr,
)
def test_an_end_token_is_drawn_unless_an_option_masks_it(vocab: Vocab, options: dict[str, Any], is_drawn: bool) -> None:
    ends = sorted(vocab.end_tokens)
    options = {name: ends if value == "end" else value for name, value in options.items()}
    published = options.pop("published", ())
    logits = np.zeros(vocab.n_tokens, np.float32)
    logits[ends] = 9
    request = JobRequest(prompt="x", seed=1, temperature=0, **options)
    sampler = prepare(vocab, request, published=TokenSpan(0, published, 0, "")).sampler
    assert (sampler.sample(logits, [1, *published], 1) in ends) is is_drawn


def test_a_stop_token_is_masked_before_the_minimum_of_tokens(vocab: Vocab) -> None:
    logits = np.zeros(vocab.n_tokens, np.float32)
    logits[300] = 9
    job = prepare(vocab, JobRequest(prompt="x", seed=1, temperature=0, stop_token_ids=[300], min_tokens=2))
    assert [job.sampler.sample(logits.copy(), [1, *[5] * n], 1) == 300 for n in range(4)] == [False, False, True, True]


def test_a_banned_token_is_no_part_of_the_standard_deviation(vocab: Vocab) -> None:
    logits = np.random.default_rng(0).normal(size=vocab.n_tokens).astype(np.float32)
    logits[[300, 301]] = 6
    requests = (JobRequest(prompt="x", seed=seed, logit_bias={300: -1e9}, top_n_sigma=0.1) for seed in range(50))
    drawn = {prepare(vocab, request).sampler.sample(logits.copy(), [1], 1) for request in requests}
    assert drawn == {301}


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_a_token_outside_the_vocabulary_is_refused_by_the_name_of_its_option(vocab: Vocab, name: str) -> None:
    prepare(vocab, JobRequest(prompt="x", seed=1, **{name: [vocab.n_tokens - 1]}))
    with pytest.raises(JobRejected, match=f": {name}: token id {vocab.n_tokens} is not in") as refused:
        prepare(vocab, JobRequest(prompt="x", seed=1, **{name: [1, vocab.n_tokens]}))
    assert refused.value.code == ErrorCode.INVALID_TOKEN


@pytest.mark.parametrize("special", [False, True])
def test_the_detokenizer_has_the_options_of_stop_strings(vocab: Vocab, special: bool) -> None:
    tokens = [token for letter in "ab ab" for token in vocab.encode_part(letter)]
    request = JobRequest(prompt="x", seed=1, stop=("ab",), min_tokens=2, include_stop=True, special=special)
    published = TokenSpan(0, tuple(tokens[:1]), 0, "")
    attempt = prepare_attempt(vocab, request, published=published)
    assert isinstance(attempt.job, Job)
    detokenizer = attempt.job.detokenizer
    assert "".join([*attempt.texts, *map(detokenizer.feed, tokens[1:])]).replace("  ", " ") == vocab.decode(tokens)
    assert detokenizer.stop_string == "ab"


@pytest.mark.parametrize("special", [False, True])
def test_the_detokenizer_knows_the_indentation_that_is_required(vocab: Vocab, special: bool) -> None:
    tokens = [token for part in ("a", "\n", "  b", "\n", "c") for token in vocab.encode_part(part)]
    request = JobRequest(prompt="x", seed=1, n_indent=2, special=special)
    detokenizer = prepare(vocab, request).detokenizer
    text = "".join(map(detokenizer.feed, tokens))
    assert detokenizer.has_ended
    assert text == vocab.decode(tokens).partition("c")[0]


@pytest.mark.parametrize(
    ("options", "can_end"),
    [({}, True), ({"ignore_eos": True}, False), ({"allowed_token_ids": [5]}, False)],
    ids=str,
)
def test_the_sampler_infill_ends_only_a_job_that_may_end_anywhere(
    vocab: Vocab, options: dict[str, Any], can_end: bool
) -> None:
    sampler = prepare(vocab, JobRequest(prompt="x", seed=1, samplers=["infill"], **options)).sampler
    even = np.zeros(vocab.n_tokens, np.float32)  # no token is probable enough
    even[sorted(vocab.end_tokens)] = -50.0
    assert (sampler.sample(even, [1], 1) in vocab.end_tokens) == can_end
    sampler.close()


def test_the_budget_of_reasoning_knows_the_prompt_and_the_tags_of_the_job(vocab: Vocab) -> None:
    request = JobRequest(prompt="<why>", seed=1, reasoning_budget=1, reasoning_open="<why>", reasoning_close="</why>")
    sampler, history = prepare(vocab, request).sampler, vocab.encode("<why>")
    n_prompt = len(history)
    for _ in range(1 + len(vocab.encode_part("</why>"))):
        history.append(sampler.sample(np.zeros(vocab.n_tokens, np.float32), history, n_prompt))
    assert vocab.decode(history[n_prompt + 1 :]) == "</why>"


def test_the_text_has_control_tokens_on_request(vocab: Vocab) -> None:
    tokens = vocab.encode("<|user|>hi")
    texts = [
        "".join(map(prepare(vocab, JobRequest(prompt="x", seed=1, special=special)).detokenizer.feed, tokens))
        for special in (False, True)
    ]
    assert texts == ["hi", "<|bos|><|user|>hi"]


def test_a_resumed_job_knows_the_tags_that_were_generated(tag_vocab: Vocab) -> None:
    opening, spelled = tag_vocab.tag_tokens["<tool_call>"], list(b"<tool_call>")
    published = TokenSpan(0, (*"é".encode()[:1], opening, *spelled, 97, opening), 0, "")
    stop = ("<tool_call>a<tool_call>b",)
    offsets = []
    for special in (False, True):
        request = JobRequest(prompt="x", seed=1, special=special, stop=stop)
        attempt = prepare_attempt(tag_vocab, request, published=published)
        assert isinstance(attempt.job, Job)
        assert attempt.job.detokenizer.feed(opening) == "<tool_call>a<tool_call>"
        offsets.append((attempt.tag_offsets, attempt.job.detokenizer.tag_offset))
    assert offsets == [([], None), ([1, 24], 35)], "the text of the last resumed tag was withheld"


def test_a_spelled_tag_does_not_end_the_reasoning(tag_vocab: Vocab) -> None:
    opening, closing = tag_vocab.tag_tokens["<think>"], tag_vocab.tag_tokens["</think>"]
    prompt = [1, opening, *b"<tool_call>"]
    request = JobRequest(tokens=prompt, seed=1, temperature=0, reasoning_budget=10)
    sampler, logits = prepare(tag_vocab, request).sampler, np.zeros(tag_vocab.n_tokens, np.float32)
    history = [*prompt, *b"</think>"]
    logits[97] = 1
    for expected in (97, 97, closing, 97, 97, 97):
        history.append(sampler.sample(logits.copy(), history, len(prompt)))
        assert history[-1] == expected


def test_a_prompt_is_scored_until_its_scores_are_published_with_the_first_token(vocab: Vocab) -> None:
    request = JobRequest(prompt="Once upon a time", seed=1, prompt_logprobs=3)
    job = prepare(vocab, request)
    assert job.prompt_scorer is not None
    assert job.prompt_scorer.n_top == 3
    assert job.scores_prompt
    assert not job.reuses_cells
    scores = PromptLogprobs(tuple(job.prompt), 3, b"")
    resumed = prepare_attempt(vocab, request, published=TokenSpan(0, (5,), 0, "", prompt_logprobs=scores))
    assert isinstance(resumed.job, Job)
    assert resumed.prompt_logprobs is scores
    assert resumed.job.prompt_scorer is None
    assert resumed.job.reuses_cells
    assert prepare(vocab, JobRequest(prompt="Once", seed=1)).reuses_cells


def test_too_many_probabilities_of_a_prompt_are_refused(vocab: Vocab) -> None:
    tokens = (1,) * 23_810
    for n_top, n_tokens in ((20, 23_809), (4, 23_810)):
        prepare_large(vocab, JobRequest(tokens=tokens[:n_tokens], seed=1, prompt_logprobs=n_top))
    with pytest.raises(
        JobRejected, match=r"prompt_logprobs: 23810 tokens with 20 .* ask for fewer alternatives"
    ) as one:
        prepare_large(vocab, JobRequest(tokens=tokens, seed=1, prompt_logprobs=20))
    assert one.value.code is ErrorCode.INVALID_REQUEST


def test_a_worker_whose_device_samples_refuses_to_score_a_prompt(vocab: Vocab) -> None:
    with pytest.raises(JobRejected, match=r"prompt_logprobs: not with --backend-sampling") as one:
        prepare_large(vocab, JobRequest(tokens=(1, 2), seed=1, prompt_logprobs=0), can_score_prompts=False)
    assert one.value.code is ErrorCode.INVALID_REQUEST
    prepare_large(vocab, JobRequest(tokens=(1, 2), seed=1), can_score_prompts=False)


def prepare_large(vocab: Vocab, request: JobRequest, *, can_score_prompts: bool = True) -> None:
    preparer = JobPreparer(
        vocab,
        Mock(spec=GrammarSandbox),
        WorkerSettings().job_defaults,
        context_limit=100_000,
        max_request_bytes=1_000_000,
        can_score_prompts=can_score_prompts,
    )
    lease = Lease("q.0." + "0" * 32, 0, Keys().jobs("q", 0, Priority.BULK), "1-0", 1)
    preparer.prepare(codec.encode_request(request, 1_000_000), lease, NO_OUTPUT, JobTimes(0.0)).job.close()
