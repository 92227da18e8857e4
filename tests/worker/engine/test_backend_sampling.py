from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import llama_cpp
import numpy as np
import pytest

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.core.batch import Batch, DecodeToken, PrefillChunk, SlotResult
from llamaq.worker.core.job_parts import N_LARGEST
from llamaq.worker.core.slot import Run, Slot, SlotState
from llamaq.worker.engine.backend_samplers import BackendSamplers, LargestLogits
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.llama_bindings import SUCCESS, Model
from llamaq.worker.engine.load_options import ContextOptions, ModelOptions
from llamaq.worker.generation.sampling.logit_sampler import LogitSampler
from llamaq.worker.testing import make_job

OPTIONS = ContextOptions(
    n_ctx=1024,
    n_batch=128,
    n_ubatch=32,
    n_seq_max=16,
    n_threads=1,
    n_threads_batch=1,
)
SAMPLED = {"temperature": 0.9, "top_k": 40}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    SAMPLED,
    SAMPLED | {"repeat_penalty": 1.3},
    SAMPLED | {"top_k": 0},  # needs all logits
    {"temperature": 0.0, "presence_penalty": -0.5},  # needs all logits
]
N_ALL_LOGITS = 2
"""Number of these kinds that need all logits."""


def start_engine(model: Path, *, backend_sampling: bool) -> Engine:
    return Engine(Model(model, ModelOptions(n_gpu_layers=0)), replace(OPTIONS, backend_sampling=backend_sampling))


@pytest.fixture
def engine(any_model: Path) -> Iterator[Engine]:
    engine = start_engine(any_model, backend_sampling=True)
    yield engine
    engine.close()


@pytest.fixture
def plain_engine(any_model: Path) -> Iterator[Engine]:
    engine = start_engine(any_model, backend_sampling=False)
    yield engine
    engine.close()


def samplers_of(engine: Engine) -> BackendSamplers:
    assert engine._backend_samplers is not None
    return engine._backend_samplers


def new_slot(index: int, params: dict[str, Any], seq_id: int | None = None) -> Slot:
    sampler = LogitSampler(SamplingDefaults(**params), seed=index)
    tokens = np.random.default_rng(index).integers(0, 500, 20 + index).tolist()
    job = make_job(tokens, sampler=sampler)  # type: ignore[arg-type]
    return Slot(index, SlotState.PREFILL, Run(job, index if seq_id is None else seq_id, list(tokens)))


def run_tick(engine: Engine, slots: Sequence[Slot]) -> list[SlotResult]:
    decode = tuple(DecodeToken(slot) for slot in slots if slot.n_pending == 1)
    prefill = tuple(PrefillChunk(slot, slot.n_pending) for slot in slots if slot.n_pending > 1)
    results = engine.run(Batch(decode, prefill))
    for result in results:
        assert result.error is None
        result.slot.active.n_past = result.n_past
        result.slot.active.tokens += [sampled.token for sampled in result.sampled]
    return results


def generate(engine: Engine, slots: Sequence[Slot], n: int) -> list[list[int]]:
    """Generate `n` tokens in each slot, remove the sequences, and return the tokens."""
    for _ in range(n):
        run_tick(engine, slots)
    for slot in slots:
        engine.sequences.remove(slot.active.seq_id)
    return [slot.active.tokens[slot.active.n_prompt :] for slot in slots]


def test_the_output_is_the_same_with_and_without_backend_sampling(engine: Engine, plain_engine: Engine) -> None:
    outputs = []
    for each in (engine, plain_engine):
        slots = [new_slot(index, params) for index, params in enumerate(KINDS)]
        outputs.append(generate(each, slots, 15))
    assert outputs[0] == outputs[1]
    assert len(samplers_of(engine)._chains) == engine.sequences.n_sequences - N_ALL_LOGITS


@pytest.mark.interpreted  # it replaces a part of a compiled class
def test_the_device_returns_the_largest_logits_of_each_row(
    engine: Engine, plain_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = [new_slot(index, SAMPLED) for index in range(3)]
    rows = record_rows(engine, monkeypatch)
    run_tick(engine, slots)
    expected = record_rows(plain_engine, monkeypatch)
    run_tick(plain_engine, [new_slot(index, SAMPLED) for index in range(3)])
    for row, logits in zip(rows, expected, strict=True):
        assert isinstance(row, LargestLogits)
        assert row.tokens.size == N_LARGEST
        assert sorted(row.tokens) == sorted(np.argsort(-logits)[:N_LARGEST])
        assert (row.logits == logits[row.tokens]).all()


def test_the_other_logits_are_copied_only_if_a_job_needs_them(engine: Engine) -> None:
    slots = [new_slot(index, SAMPLED) for index in range(3)]
    run_tick(engine, slots)
    untouched = 12345.0
    engine.context.logits(3)[:] = untouched
    run_tick(engine, slots)
    assert (engine.context.logits(3) == untouched).all()
    run_tick(engine, [*slots, new_slot(3, KINDS[3])])
    assert (engine.context.logits(4)[3] != untouched).all()


def record_rows(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that receives a copy of each row before it is sampled."""
    rows: list[Any] = []
    original = engine._rows

    def rows_of(*parts: Any) -> Any:
        found = original(*parts)
        for row in found:
            if isinstance(row, LargestLogits):
                rows.append(LargestLogits(row.tokens.copy(), row.logits.copy()))
            else:
                rows.append(row.copy())
        return found

    monkeypatch.setattr(engine, "_rows", rows_of)
    return rows


def test_a_sequence_changes_when_a_job_needs_all_logits_and_again_when_one_does_not(
    engine: Engine, plain_engine: Engine
) -> None:
    samplers = samplers_of(engine)
    assert 2 in samplers._chains
    for index in range(6):
        params = KINDS[3] if index % 2 else KINDS[1]
        output = generate(engine, [new_slot(index, params, seq_id=2)], 4)
        assert output == generate(plain_engine, [new_slot(index, params, seq_id=2)], 4)
        assert (2 in samplers._chains) == (index % 2 == 0)


def test_jobs_that_come_and_go_in_any_sequence_have_their_own_logits(demo_model: Path) -> None:
    engine, plain_engine = (start_engine(demo_model, backend_sampling=on) for on in (True, False))
    for seed in range(40):
        random = Random(seed)
        seq_ids, start_ticks = random.sample(range(8), 6), [random.randrange(10) for _ in range(6)]
        kinds = [random.choice(KINDS) for _ in range(6)]
        outputs = []
        for each in (engine, plain_engine):
            slots = [
                new_slot(index, kind, seq_id) for index, (kind, seq_id) in enumerate(zip(kinds, seq_ids, strict=True))
            ]
            for tick in range(12):
                if running := [slot for slot, start in zip(slots, start_ticks, strict=True) if start <= tick]:
                    run_tick(each, running)
            outputs.append([slot.active.tokens for slot in slots])
            for slot in slots:
                each.sequences.remove(slot.active.seq_id)
        assert outputs[0] == outputs[1], f"seed {seed}"
    engine.close()
    plain_engine.close()


def test_rows_keep_their_tokens_whichever_sequences_had_rows_before(engine: Engine, plain_engine: Engine) -> None:
    random, contexts = Random(0), (engine.context, plain_engine.context)
    n_tokens = [0] * 6
    for _ in range(100):
        with_row = []
        for context in contexts:
            context.batch.clear()
        for seq_id in random.sample(range(6), random.randint(1, 6)):
            chunk = random.choices(range(500), k=random.choice((1, 1, 1, 2, 3)))
            has_row = random.random() < 0.6
            for context in contexts:
                context.batch.add_chunk(chunk, n_tokens[seq_id], seq_id, has_row=has_row)
            n_tokens[seq_id] += len(chunk)
            with_row += [seq_id] * has_row
        assert [context.decode() for context in contexts] == [SUCCESS, SUCCESS]
        if with_row:
            rows = zip(samplers_of(engine).rows(with_row), plain_engine.context.logits(len(with_row)), strict=True)
            for row, logits in rows:
                assert isinstance(row, LargestLogits)
                assert (row.logits == logits[row.tokens]).all()


@pytest.mark.interpreted  # it replaces a part of a compiled class
def test_a_job_whose_largest_logits_are_not_numbers_fails_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = [new_slot(index, params) for index, params in enumerate((KINDS[0], SAMPLED))]
    run_tick(engine, slots)
    largest = BackendSamplers._largest

    def damaged(samplers: BackendSamplers, index: int) -> LargestLogits:
        row = largest(samplers, index)
        if index == -1:
            row.logits[7] = np.nan
        return row

    monkeypatch.setattr(BackendSamplers, "_largest", damaged)
    errors = [result.error for result in engine.run(Batch(tuple(map(DecodeToken, slots)), ()))]
    assert errors[0] is None
    assert isinstance(errors[1], JobRejected)
    assert errors[1].code is ErrorCode.DECODE_FAILED


def test_a_device_that_cannot_find_the_largest_logits_leaves_the_sampling_to_the_cpu(
    any_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # llama.cpp cannot run this sampler on any device.
    monkeypatch.setattr(llama_cpp, "llama_sampler_init_top_k", lambda _k: llama_cpp.llama_sampler_init_typical(0.5, 1))
    engine = start_engine(any_model, backend_sampling=True)
    assert "engine.no_backend_sampling" in caplog.text
    plain_engine = start_engine(any_model, backend_sampling=False)
    outputs = [generate(each, [new_slot(1, SAMPLED)], 4) for each in (engine, plain_engine)]
    assert outputs[0] == outputs[1]
    engine.close()
    plain_engine.close()
