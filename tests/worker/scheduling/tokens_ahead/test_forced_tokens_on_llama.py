"""With the demo model and a JSON schema, forced tokens are the same whether they are computed ahead or drawn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llguidance
import pytest

from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.core.batch import Batch
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import NewToken, Output
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.llama_bindings import Model
from llamaq.worker.engine.load_options import ContextOptions, ModelOptions
from llamaq.worker.generation.detokenizer import StreamDetokenizer
from llamaq.worker.generation.grammar.token_constraint import ConstraintTokenizer
from llamaq.worker.generation.sampling.logit_sampler import LogitSampler
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.kv_cache.prefix_cache_interface import NullPrefixCache
from llamaq.worker.kv_cache.slot_pool import SlotPool
from llamaq.worker.scheduling.scheduler import Scheduler
from llamaq.worker.scheduling.strategies.batch_strategies import DecodeMaximal
from llamaq.worker.scheduling.strategies.guarded_strategy import GuardedStrategy, TickLimits
from llamaq.worker.testing import ManualClock, make_job

FIELDS = ["name", "occupation", "a_name_of_a_field_that_has_more_tokens_than_one_look_ahead_finds", "things"]
SCHEMA = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "object",
    "properties": {
        FIELDS[0]: {"type": "string", "pattern": "^[a-z]{40,50}$"},
        FIELDS[1]: {"enum": ["teacher", "engineer", "doctor"]},
        FIELDS[2]: {"type": "boolean"},
        FIELDS[3]: {"type": "array", "items": {"enum": ["apple pie", "banana bread"]}, "minItems": 12, "maxItems": 14},
    },
    "required": FIELDS,
    "additionalProperties": False,
}
N_JOBS = 4


class Rig:
    """Runs jobs on the demo model. Each tick takes a second of the clock."""

    def __init__(self, model: Path) -> None:
        options = ContextOptions(
            n_ctx=2048, n_batch=64, n_ubatch=64, n_seq_max=8, n_threads=1, n_threads_batch=1, n_logits=N_JOBS
        )
        self.engine = Engine(Model(model, ModelOptions(n_gpu_layers=0)), options)
        self._constraints = ConstraintTokenizer(self.engine.vocab)

    def make_jobs(self, **params: Any) -> list[Job]:
        return [self._make_job(seed, params) for seed in range(N_JOBS)]

    def _make_job(self, seed: int, params: dict[str, Any]) -> Job:
        vocab = self.engine.vocab
        job = make_job(vocab.encode(f"Story {seed}: there was"), max_tokens=400)
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))
        constraint = self._constraints.compile(grammar)
        job.sampler = LogitSampler(SamplingDefaults(**params), seed=seed, grammar=constraint)
        job.detokenizer = StreamDetokenizer(vocab.piece, ())
        return job

    def run(self, jobs: list[Job], build_s: float) -> tuple[list[list[int]], list[Batch], int]:
        """Return the tokens of the jobs, the batches, and the number of plans.

        Args:
            jobs: The jobs.
            build_s: How much longer a tick takes if the last one had another number of tokens.
        """
        clock, engine = ManualClock(), self.engine
        scheduler = Scheduler(
            KvMemory(SlotPool(N_JOBS, engine.context.n_ctx, 8), engine.sequences, NullPrefixCache()),
            GuardedStrategy(DecodeMaximal(), TickLimits(budget=64, chunk_size=32)),
            end_tokens=engine.vocab.end_tokens,
            clock=clock,
        )
        for job in jobs:
            scheduler.submit(job)
        repeater, tokens, batches = scheduler.repeater, {job.id: list[int]() for job in jobs}, [Batch()]
        n_plans = 0
        while scheduler.has_work:
            scheduler.admit()
            batch: Batch | None = scheduler.plan()
            n_plans += 1
            outputs: list[Output] = []
            while batch is not None:
                if (preparation := repeater.preparation(batch)) is not None:
                    preparation()
                clock.now_s += 1.0 + (0.0 if batch.n_tokens == batches[-1].n_tokens else build_s)
                batches.append(batch)
                results = engine.run(batch)
                batch = repeater.next_batch(results)
                if batch is not None:
                    outputs += repeater.late_outputs(batches[-1], results, clock()).outputs
            outputs += scheduler.apply(batches[-1], results).outputs
            scheduler.check_integrity()
            for output in outputs:
                if isinstance(output, NewToken):
                    tokens[output.job.id].append(output.token)
        return list(tokens.values()), batches[1:], n_plans


@pytest.fixture(scope="module")
def rig(demo_model: Path) -> Iterator[Rig]:
    rig = Rig(demo_model)
    yield rig
    rig.engine.close()


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.2}], ids=str)
def test_forced_tokens_are_drawn_in_repeated_ticks_if_they_do_not_pay(rig: Rig, params: dict[str, Any]) -> None:
    ahead, with_forced, n_plans = rig.run(rig.make_jobs(**params), 0.0)
    drawn, without, n_plans_without = rig.run(rig.make_jobs(**params), 20.0)
    for tokens in drawn:
        text = b"".join(map(rig.engine.vocab.piece, tokens)).decode()
        assert list(json.loads(text)) == FIELDS
    assert drawn == ahead
    n_ahead, n_drawn = (sum(batch.n_forced for batch in batches) for batches in (with_forced, without))
    assert n_ahead > 150
    assert n_drawn < 0.6 * n_ahead, "those that measure the times are computed ahead too"
    assert n_plans_without < n_plans
