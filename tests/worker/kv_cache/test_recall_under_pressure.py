"""The demo model recalls facts in eight slots while sequences are evicted and loaded, and jobs preempted and cancelled.

If a job used the cells of another job, its answer would be wrong. `RECALL_JOBS=500` selects the long form of the test
(`make soak-cache`).
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.tools.demo_model.fact_questions import FRAMES, draw_facts
from llamaq.tools.demo_model.seeded_choice import Split, generator
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import JobEnded, NewToken
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.llama_bindings import Model
from llamaq.worker.engine.load_options import ContextOptions, ModelOptions
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.kv_cache.prefix_cache_interface import NullPrefixCache
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.kv_cache.slot_pool import SlotPool
from llamaq.worker.offload.block_transfers import BlockTransfers
from llamaq.worker.offload.host_arena import HostArena
from llamaq.worker.scheduling.scheduler import Scheduler
from llamaq.worker.scheduling.strategies.batch_strategies import DecodeMaximal
from llamaq.worker.scheduling.strategies.guarded_strategy import GuardedStrategy, TickLimits
from llamaq.worker.testing import make_job

log = logging.getLogger(__name__)

N_JOBS = int(os.environ.get("RECALL_JOBS", "48"))
N_WORLDS = 12
ANSWER_TOKENS = 8
N_CTX = 1536


@dataclass(frozen=True)
class Question:
    """A prompt, its right answer, and the namespace of its job."""

    prompt: str
    answer: str
    salt: str


def questions(seed: int) -> list[Question]:
    """Return random questions. A world is a set of facts with several questions. It belongs to one of two tenants."""
    frame, drawn = FRAMES[1], random.Random(seed)
    asked = []
    for world in range(N_WORLDS):
        facts = draw_facts(generator(Split.HELD_OUT, "pressure", seed, world), Split.HELD_OUT, drawn.randint(10, 26))
        told = " ".join(fact.statement for fact in facts)
        for fact in facts:
            if " has " in fact.statement:
                question, answer = fact.questions[0]
                asked.append(Question(told + frame[0] + question + frame[1], frame[2] + answer, "ab"[world % 2]))
    return drawn.choices(asked, k=N_JOBS)


class Rig:
    def __init__(self, model: Path, *, cache: bool) -> None:
        options = ContextOptions(n_ctx=N_CTX, n_batch=256, n_ubatch=64, n_seq_max=24, n_threads=1, n_threads_batch=1)
        self.engine = engine = Engine(Model(model, ModelOptions(n_gpu_layers=0)), options)
        store = BlockStore(32, 3 * 2**20, can_cut=True)
        memory = KvMemory(
            SlotPool(8, engine.context.n_ctx, engine.sequences.n_sequences, similarity=0.1),
            engine.sequences,
            RadixPrefixCache() if cache else NullPrefixCache(),
            BlockTransfers(store, engine.sequences, arena=HostArena(3 * 2**20, 32)) if cache else None,
            held_cells=N_CTX // 4,
        )
        guarded = GuardedStrategy(DecodeMaximal(), TickLimits(budget=256, chunk_size=48))
        self.scheduler = Scheduler(memory, guarded, end_tokens=engine.vocab.end_tokens)
        self.generated: dict[str, list[int]] = {}
        self.ended: dict[str, JobEnded] = {}

    def tick(self) -> None:
        self.scheduler.admit()
        self.scheduler.move(0.0005)
        batch = self.scheduler.plan()
        results = self.engine.run(batch) if batch else []
        for output in self.scheduler.apply(batch, results).outputs:
            if isinstance(output, NewToken):
                self.generated.setdefault(output.job.id, []).append(output.token)
            elif isinstance(output, JobEnded):
                self.ended[output.job.id] = output
        self.scheduler.check_integrity()

    def finish(self) -> None:
        for _ in range(50_000):
            if not self.scheduler.has_work:
                return
            self.tick()
        raise AssertionError(f"{self.scheduler!r} still has work")


@pytest.fixture
def rigs(demo_model: Path) -> Iterator[tuple[Rig, Rig]]:
    pressed, alone = Rig(demo_model, cache=True), Rig(demo_model, cache=False)
    yield pressed, alone
    for rig in (pressed, alone):
        rig.engine.close()


def job_of(vocab: Vocab, question: Question, job_id: str, **params: object) -> Job:
    job = make_job(vocab.encode(question.prompt), job_id=job_id, max_tokens=ANSWER_TOKENS, **params)  # type: ignore[arg-type]
    job.scope = Scope(question.salt)
    return job


def apply_pressure(rig: Rig, vocab: Vocab, asked: Sequence[Question]) -> set[str]:
    """Ask all questions, a few at a time, with random priorities, among jobs that are cancelled while they run."""
    drawn, bystanders = random.Random(7), set()
    for at, question in enumerate(asked):
        priority = drawn.choice(["interactive", "bulk", "bulk", "bulk"])
        rig.scheduler.submit(job_of(vocab, question, f"q{at}", priority=priority))
        if at % 4 == 0:
            bystanders.add(f"x{at}")
            rig.scheduler.submit(job_of(vocab, drawn.choice(asked), f"x{at}", priority="bulk", ignore_eos=True))
        rig.tick()
        while rig.scheduler.n_waiting > 6:
            rig.tick()
        if running := [slot.job_id for slot in rig.scheduler.snapshot() if slot.job_id in bystanders]:
            rig.scheduler.cancel(drawn.choice(running) or "")
    rig.finish()
    return bystanders


@pytest.mark.timeout(1800)
def test_every_answer_equals_that_of_a_job_that_runs_alone(rigs: tuple[Rig, Rig], vocab: Vocab) -> None:
    pressed, alone = rigs
    asked = questions(1)
    bystanders = apply_pressure(pressed, vocab, asked)
    assert pressed.ended.keys() == {f"q{at}" for at in range(N_JOBS)} | bystanders
    n_right = 0
    for at, question in enumerate(asked):
        alone.scheduler.submit(job_of(vocab, question, f"q{at}"))
        alone.finish()
        assert pressed.generated[f"q{at}"] == alone.generated[f"q{at}"], question
        n_right += vocab.decode(pressed.generated[f"q{at}"]).strip().startswith(question.answer.strip())
    assert n_right >= 0.9 * N_JOBS
    snapshot = pressed.scheduler.cache_snapshot()
    assert min(snapshot.evictions, snapshot.hits, snapshot.preemptions, snapshot.host_bytes) > 0
    log.info("%d questions, %d right; %r", N_JOBS, n_right, snapshot)
