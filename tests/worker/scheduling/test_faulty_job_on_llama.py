"""A strong LoRA adapter, whose keys are larger than the largest number of F16, spoils no job without it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.lora_files import write_lora
from tests.support.outputs import tokens_of
from tests.support.ticked_jobs import ends_of

from llamaq.common.errors import ErrorCode
from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.tools.random_gguf import PLAIN, Weights, write_model
from llamaq.worker.core.finish_rules import ALL_NAN
from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import Output
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.llama_bindings import Model
from llamaq.worker.engine.load_options import ContextOptions, FlashAttention, ModelOptions
from llamaq.worker.engine.scaled_file import ScaledFile
from llamaq.worker.generation.sampling.logit_sampler import LogitSampler
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.kv_cache.slot_pool import SlotPool
from llamaq.worker.scheduling.adapter_turns import TURN_S
from llamaq.worker.scheduling.scheduler import Scheduler
from llamaq.worker.scheduling.strategies.batch_strategies import DecodeMaximal
from llamaq.worker.scheduling.strategies.guarded_strategy import GuardedStrategy, TickLimits
from llamaq.worker.testing import ManualClock, make_job

NO_ADAPTER, OVERFLOW = (0.0,), (1e6,)
"""Scales of the adapter."""
ModelParts = tuple[Scheduler, Engine, ManualClock]


def run(parts: ModelParts, n_ticks: int | None = None) -> list[Output]:
    """Run ticks, each of which is long enough for a turn of the jobs with equal scales."""
    scheduler, engine, clock = parts
    outputs: list[Output] = []
    while scheduler.has_work and n_ticks != 0:
        clock.now_s += 2 * TURN_S
        scheduler.admit()
        scheduler.move(0)
        batch = scheduler.plan()
        outputs += scheduler.apply(batch, engine.run(batch) if batch else []).outputs
        scheduler.check_integrity()
        n_ticks = None if n_ticks is None else n_ticks - 1
    return outputs


def make_model_job(prompt: Sequence[int], scales: tuple[float, ...] = NO_ADAPTER, temperature: float = 1) -> Job:
    job = make_job(prompt, max_tokens=12)
    job.sampler = LogitSampler(SamplingDefaults(temperature=temperature), seed=3)
    job.adapter_scales = scales
    return job


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("faulty")
    model = write_model(folder / "model.gguf", replace(PLAIN, weights=Weights.F32))
    return model, write_lora(folder / "lora.gguf", model)


@pytest.fixture(params=["off", "on"])
def parts(files: tuple[Path, Path], request: pytest.FixtureRequest) -> Iterator[ModelParts]:
    flash_attn: FlashAttention = request.param
    options = ContextOptions(512, 64, 64, 6, 1, 1, flash_attn=flash_attn)
    model, lora = files
    engine = Engine(Model(model, ModelOptions(n_gpu_layers=0, lora=(ScaledFile(lora, 0),))), options)
    pool = SlotPool(3, engine.context.n_ctx, engine.sequences.n_sequences)
    memory = KvMemory(pool, engine.sequences, RadixPrefixCache())
    strategy = GuardedStrategy(DecodeMaximal(), TickLimits(budget=64, chunk_size=16))
    clock = ManualClock()
    yield Scheduler(memory, strategy, end_tokens=frozenset(), clock=clock), engine, clock
    engine.close()


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_the_options_of_a_job_that_make_its_logits_infinite_disturb_no_other_job(
    parts: ModelParts, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, *_ = parts
    job = make_job([7, *range(40, 60)], max_tokens=12)
    params = SamplingDefaults(samplers=("penalties",) * 20, repeat_penalty=0.01)
    job.sampler = LogitSampler(params, seed=1)
    scheduler.submit(job)
    error = ends_of(run(parts))[job.id].error
    assert error is not None
    assert error.code is ErrorCode.DECODE_FAILED
    assert "cache.cleared" not in caplog.text


@pytest.mark.parametrize("n_prompt", [10, 100])
def test_the_keys_of_a_strong_adapter_spoil_no_other_job(
    parts: ModelParts, n_prompt: int, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, *_ = parts
    prompts = [[number, *range(40, 70)] for number in range(5, 7)]

    def submit() -> list[Job]:
        jobs = [
            make_model_job(prompt, temperature=temperature) for prompt, temperature in zip(prompts, (0, 1), strict=True)
        ]
        for job in jobs:
            scheduler.submit(job)
        return jobs

    expected_jobs = submit()
    expected = run(parts)
    jobs = submit()
    outputs = run(parts, n_ticks=5)
    faulty = make_model_job(list(range(100, 100 + n_prompt)), OVERFLOW)
    scheduler.submit(faulty)
    outputs += run(parts)
    ends = ends_of(outputs)
    error = ends[faulty.id].error
    assert error is not None
    assert error.message == ALL_NAN
    assert "cache.cleared" in caplog.text
    for job, expected_job in zip(jobs, expected_jobs, strict=True):
        assert ends[job.id].reason is FinishReason.LENGTH
        assert tokens_of(outputs, job.id) == tokens_of(expected, expected_job.id)
