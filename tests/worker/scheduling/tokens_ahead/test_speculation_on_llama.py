"""Speculation with the demo model and real samplers: each job's output is that of a worker that drafts nothing.

Logits differ a little with the shape of a batch, so in rare cases a draw can differ, and then the rest of that job too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import llguidance
import pytest

from llamaq.common.protocol.job_outcome import TokenLogprobs
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.core.draft import Drafting
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import JobEnded, NewToken
from llamaq.worker.engine.draft_model import DraftModel
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.llama_bindings import Model
from llamaq.worker.engine.load_options import ContextOptions, ModelOptions
from llamaq.worker.generation.detokenizer import StreamDetokenizer
from llamaq.worker.generation.grammar.gbnf_to_lark import gbnf_to_lark
from llamaq.worker.generation.grammar.token_constraint import ConstraintTokenizer
from llamaq.worker.generation.grammar.token_set import TokenSet
from llamaq.worker.generation.ngram_drafter import NgramDrafter
from llamaq.worker.generation.sampling.logit_sampler import LogitSampler
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.kv_cache.slot_pool import SlotPool
from llamaq.worker.scheduling.scheduler import Scheduler
from llamaq.worker.scheduling.strategies.batch_strategies import DecodeMaximal
from llamaq.worker.scheduling.strategies.guarded_strategy import GuardedStrategy, TickLimits
from llamaq.worker.scheduling.tokens_ahead.draft_model_speculation import DraftModelSpeculation
from llamaq.worker.scheduling.tokens_ahead.draft_sequences import DraftSequences
from llamaq.worker.scheduling.tokens_ahead.ngram_speculation import NgramSpeculation
from llamaq.worker.scheduling.tokens_ahead.speculation import Speculation
from llamaq.worker.testing import ManualClock, make_job

N_DRAFT_TOKENS = 24
MAX_TOKENS = 48
STORY = "Once upon a time there was a robot named Max. One day Max found a box. One day Max found"
FEW = 5
"""Number of tokens that a job may choose from, if its text shall repeat itself."""
JOBS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9},
    "few": {"temperature": 3, "few": FEW},
    "one": {"temperature": 0, "few": 1},
    "penalties": {"temperature": 0.7, "few": FEW, "repeat_penalty": 1.3, "frequency_penalty": 0.2},
    "dry": {"temperature": 0.7, "few": FEW, "dry_multiplier": 0.8},
    "mirostat": {"temperature": 4, "few": FEW, "mirostat": 2},
    "adaptive-p": {"temperature": 3, "few": FEW, "adaptive_target": 0.4},
    "xtc": {"temperature": 3, "few": FEW, "xtc_probability": 0.5},
    "logprobs": {"temperature": 3, "few": FEW, "logprobs": 3},
    "drawn logprobs": {"temperature": 3, "few": FEW, "logprobs": 3, "post_sampling_probs": True},
    "grammar": {"temperature": 1, "grammar": 'root ::= ("red " | "blue ")+ "."'},
    "stop": {"temperature": 0, "few": 1, "stop": ["aaaaaaa"]},
    "stop token": {"temperature": 3, "few": FEW, "stop_token_ids": [302], "min_tokens": 24},
    "late stop": {"temperature": 0, "few": 1, "stop": ["aaaaaaa"], "min_tokens": 10},
    "listed": {"temperature": 3, "allowed_token_ids": range(300, 300 + FEW)},
    "short": {"temperature": 0, "few": 1, "max_tokens": 11},
}
OF_SAMPLER = SamplingDefaults.model_fields.keys()
OF_REQUEST = ("max_tokens", "min_tokens", "stop", "stop_token_ids")


ACCEPTED = {
    "ngram": {"one", "few", "logprobs", "stop", "short", "listed"},
    "model": {"greedy", "sampled"},  # the draft model does not know the few tokens that the other jobs choose from
}
"""Jobs whose drafts are accepted."""


class Rig:
    """A scheduler with the demo model. It drafts tokens for its jobs as the setting `speculation` says.

    The draft model is the demo model too, so that it drafts what a greedy job generates.
    """

    def __init__(self, model: Path, speculation: str) -> None:
        options = ContextOptions(
            n_ctx=2048,
            n_batch=128,
            n_ubatch=128,
            n_seq_max=16,
            n_threads=1,
            n_threads_batch=1,
            n_logits=4 + N_DRAFT_TOKENS,
        )
        self.engine = engine = Engine(Model(model, ModelOptions(n_gpu_layers=0)), options)
        self.kind = speculation
        end_tokens, self.draft_model = engine.vocab.end_tokens, None
        planner: Speculation | None = NgramSpeculation(end_tokens, N_DRAFT_TOKENS) if speculation == "ngram" else None
        if speculation == "model":
            self.draft_model = DraftModel(
                Model(model, ModelOptions(n_gpu_layers=0)),
                replace(options, n_seq_max=4),
                n_vocab=engine.vocab.n_tokens,
                end_tokens=end_tokens,
                clock=ManualClock(),
            )
            sequences = DraftSequences(4, options.n_ctx, self.draft_model.context.n_vocab, held_cells=64)
            planner = DraftModelSpeculation(end_tokens, N_DRAFT_TOKENS, sequences, max_missing=128)
        self._constraints = ConstraintTokenizer(engine.vocab)
        pool = SlotPool(4, engine.context.n_ctx, engine.sequences.n_sequences)
        self.scheduler = Scheduler(
            KvMemory(pool, engine.sequences, RadixPrefixCache()),
            GuardedStrategy(DecodeMaximal(), TickLimits(budget=128, chunk_size=32)),
            end_tokens=engine.vocab.end_tokens,
            speculation=planner,
            clock=ManualClock(),  # ticks take no time, so that every draft promises a gain
        )
        self.n_drafted = 0

    def run(self, jobs: dict[str, Job]) -> dict[str, tuple[list[NewToken], JobEnded]]:
        """Run all jobs, and return the tokens and the end of each."""
        tokens: dict[str, list[NewToken]] = {name: [] for name in jobs}
        ends: dict[str, JobEnded] = {}
        names = {job.id: name for name, job in jobs.items()}
        for job in jobs.values():
            self.scheduler.submit(job)
        while self.scheduler.has_work:
            self.scheduler.admit()
            self.scheduler.move(0)
            batch = self.scheduler.plan()
            if self.draft_model is not None:
                batch = self.draft_model.add_drafts(batch)
                assert not batch.draft_work.has_failed
            self.n_drafted += batch.n_drafted
            for output in self.scheduler.apply(batch, self.engine.run(batch) if batch else []).outputs:
                if isinstance(output, NewToken):
                    tokens[names[output.job.id]].append(output)
                elif isinstance(output, JobEnded):
                    ends[names[output.job.id]] = output
            self.scheduler.check_integrity()
        return {name: (tokens[name], ends[name]) for name in jobs}

    def make_job(self, prompt: list[int], seed: int, options: dict[str, Any], resumed: tuple[int, ...] = ()) -> Job:
        vocab = self.engine.vocab
        few = [vocab.encode("a" * 2)[-1], *range(300, 300 + options.get("few", 0) - 1)] if "few" in options else []
        grammar = options.get("grammar")
        constraint = None
        if grammar:
            constraint = self._constraints.compile(
                llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark(grammar, "root"))
            )
        of_request = {name: options[name] for name in OF_REQUEST if name in options}
        job = make_job(prompt, resumed=resumed, **{"max_tokens": MAX_TOKENS} | of_request)
        only = options.get("allowed_token_ids")
        job.sampler = LogitSampler(
            SamplingDefaults(**{name: value for name, value in options.items() if name in OF_SAMPLER}),
            seed=seed,
            logit_bias=dict.fromkeys(few, 40.0),
            end_tokens=vocab.end_tokens | job.stop_tokens,
            min_tokens=job.request.min_tokens,
            only=None if only is None else TokenSet.of(only, vocab.n_tokens),
            grammar=constraint,
            n_logprobs=options.get("logprobs"),
            has_drawn_logprobs="post_sampling_probs" in options,
        )
        job.detokenizer = StreamDetokenizer(vocab.piece, job.request.stop, min_tokens=job.request.min_tokens)
        if self.kind != "off":
            job.drafting = Drafting(NgramDrafter(prompt) if self.kind == "ngram" else None, 12)
        return job

    def make_jobs(self) -> dict[str, Job]:
        prompt = self.engine.vocab.encode(STORY)
        return {name: self.make_job(prompt[: 12 + at], at, options) for at, (name, options) in enumerate(JOBS.items())}

    def close(self) -> None:
        if self.draft_model is not None:
            self.draft_model.close()
        self.engine.close()


@pytest.fixture(scope="module", params=["ngram", "model"])
def drafting(request: pytest.FixtureRequest, demo_model: Path) -> Iterator[Rig]:
    rig = Rig(demo_model, request.param)
    yield rig
    rig.close()


@pytest.fixture(scope="module")
def plain(demo_model: Path) -> Iterator[Rig]:
    rig = Rig(demo_model, "off")
    yield rig
    rig.close()


@pytest.fixture
def rigs(drafting: Rig, plain: Rig) -> tuple[Rig, Rig]:
    return drafting, plain


def first_difference(one: list[NewToken], other: list[NewToken]) -> int:
    pairs = zip(one, other, strict=False)
    unequal = (at for at, (a, b) in enumerate(pairs) if a.token != b.token)
    return next(unequal, min(len(one), len(other)))


def assert_close(one: TokenLogprobs | None, other: TokenLogprobs | None) -> None:
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert one.logprob == pytest.approx(other.logprob, abs=0.05)
        assert dict(one.top) == pytest.approx(dict(other.top), abs=0.05)


def test_every_job_has_the_output_of_a_worker_without_speculation(rigs: tuple[Rig, Rig]) -> None:
    with_drafts, without = (rig.run(rig.make_jobs()) for rig in rigs)
    assert rigs[0].n_drafted > 100
    n_tokens = n_equal = 0
    for name in JOBS:
        (tokens, end), (expected, expected_end) = with_drafts[name], without[name]
        place = first_difference(tokens, expected)
        n_tokens += len(expected)
        n_equal += place
        for one, other in zip(tokens[:place], expected[:place], strict=True):
            assert_close(one.logprobs, other.logprobs)
            assert (one.draw_probability is None) == (other.draw_probability is None)
        if place == len(expected):
            assert (
                "".join(one.text for one in tokens) + end.text
                == "".join(one.text for one in expected) + expected_end.text
            )
            assert (end.reason, end.error) == (expected_end.reason, expected_end.error), name
            assert end.stats.stop_string == expected_end.stats.stop_string
            assert end.stats.stop_token == expected_end.stats.stop_token
    assert n_equal >= 0.9 * n_tokens
    accepted = {name for name in JOBS if with_drafts[name][1].stats.accepted_tokens}
    assert accepted >= ACCEPTED[rigs[0].kind]
    assert with_drafts["stop"][1].stats.stop_string == "aaaaaaa"
    assert len(with_drafts["short"][0]) == 11
    tokens, end = with_drafts["stop token"]
    assert (end.stats.stop_token, len(tokens) >= 24) == (302, True)
    assert 302 not in {one.token for one in tokens}
    tokens, end = with_drafts["late stop"]
    assert (end.stats.stop_string, len(tokens)) == ("aaaaaaa", 11)
    assert {one.token for one in with_drafts["listed"][0]} <= {*JOBS["listed"]["allowed_token_ids"]}


def test_the_next_turn_reuses_the_cells_of_drafted_tokens(rigs: tuple[Rig, Rig]) -> None:
    outputs = []
    for rig in rigs:
        prompt = rig.engine.vocab.encode("Lily had a golden key.")
        first, _ = rig.run({"first": rig.make_job(prompt, 1, JOBS["one"])})["first"]
        history = [*prompt, *(output.token for output in first), *rig.engine.vocab.encode(" Then Lily")[1:]]
        tokens, end = rig.run({"second": rig.make_job(history, 2, JOBS["greedy"])})["second"]
        assert end.stats.prefix_cache_tokens >= len(prompt) + MAX_TOKENS - 1
        outputs.append([output.token for output in tokens])
    n_compared = 20  # the next tokens are nearly equally probable
    assert outputs[0][:n_compared] == outputs[1][:n_compared]


def test_a_job_whose_worker_died_continues_with_the_tokens_that_it_would_have_had(rigs: tuple[Rig, Rig]) -> None:
    drafting, plain = rigs
    prompt = plain.engine.vocab.encode(STORY)
    for seed, options in enumerate((JOBS["greedy"], JOBS["sampled"])):
        tokens = [one.token for one in plain.run({"whole": plain.make_job(prompt, seed, options)})["whole"][0]]
        published = tuple(tokens[:20])
        rest, _ = drafting.run({"rest": drafting.make_job(prompt, seed, options, published)})["rest"]
        assert [one.token for one in rest][:20] == tokens[20:40]
