"""A fault of one job ends only this job, also a fault that llama.cpp finds in a batch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest
from tests.support.engine_ticks import (
    CHUNK,
    Greedy,
    assert_equal_output,
    generate,
    generate_alone,
    generated,
    plan_batch,
    prefill_slot,
    prompt,
    run_tick,
)

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.core.slot import Run, SlotState
from llamaq.worker.engine.engine import Engine
from llamaq.worker.engine.llama_bindings import Model
from llamaq.worker.engine.load_options import ContextOptions, ModelOptions
from llamaq.worker.generation.sampling.logit_sampler import LogitSampler


class Failing(Greedy):
    """Raises an error at the third token."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def sample(
        self, logits: npt.NDArray[np.float32], history: Sequence[int], n_prompt: int, drawn: int | None = None
    ) -> int:
        if len(history) - n_prompt == 2:
            raise self._error
        return super().sample(logits, history, n_prompt, drawn)


def fail_decodes_with(engine: Engine, seq_id: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make llama_decode fail in a late micro-batch whenever the batch has the sequence `seq_id`.

    Returns:
        A list that receives the statuses of all decodes from now on.
    """
    calls_left: list[int] = []  # number of calls of the callback before it aborts the decode
    statuses: list[int] = []

    def abort(_data: Any) -> bool:
        if not calls_left:
            return False
        calls_left[0] -= 1
        return calls_left[0] < 0

    callback = llama_cpp.ggml_abort_callback(abort)
    decode, batch = engine.context.decode, engine.context.batch

    def decode_and_record() -> int:
        calls_left.clear()
        if seq_id in batch._seq_ids[: len(batch)]:
            calls_left.append(5)
        statuses.append(decode())
        return statuses[-1]

    monkeypatch.setattr(engine.context, "decode", decode_and_record)
    monkeypatch.setattr(engine, "_abort_callback", callback, raising=False)
    llama_cpp.llama_set_abort_callback(engine.context.pointer, callback, ctypes.c_void_p())
    return statuses


def test_a_failing_sampler_fails_only_its_own_job(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    refusal = JobRejected(ErrorCode.GRAMMAR_EXHAUSTED, "nothing may follow")
    slots = [
        prefill_slot(0, prompt(9, seed=1)),
        prefill_slot(1, prompt(9, seed=2), Failing(refusal)),
        prefill_slot(2, prompt(9, seed=3), Failing(ZeroDivisionError("oops"))),
    ]
    errors = generate(engine, slots, 6)
    assert errors[1] is refusal
    assert errors[2].code == ErrorCode.INTERNAL
    assert "oops" in errors[2].message
    assert "ZeroDivisionError" in caplog.text
    assert_equal_output(slots[0], generate_alone(engine, prompt(9, seed=1), 6))


@pytest.mark.parametrize("n_not_numbers", [1, 500])
@pytest.mark.parametrize("checks_logits", [False, True])
def test_logits_that_are_not_numbers_fail_only_their_own_job(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    n_not_numbers: int,
    checks_logits: bool,
) -> None:
    compute_logits = engine.context.logits

    def damage_the_first_row(n_rows: int) -> npt.NDArray[np.float32]:
        logits = compute_logits(n_rows)
        logits[0, :n_not_numbers] = np.nan
        monkeypatch.undo()
        return logits

    sampler: Any = LogitSampler(SamplingDefaults(), seed=1) if checks_logits else Greedy()
    assert sampler.checks_logits is checks_logits
    slots = [prefill_slot(0, prompt(9, seed=1), sampler), prefill_slot(1, prompt(9, seed=2))]
    monkeypatch.setattr(engine.context, "logits", damage_the_first_row)
    errors = generate(engine, slots, 6)
    assert errors.keys() == {0}
    assert errors[0].code == ErrorCode.DECODE_FAILED
    assert "not numbers" in errors[0].message
    assert f"logits_not_numbers id={slots[0].active.job.id}" in caplog.text
    assert_equal_output(slots[1], generate_alone(engine, prompt(9, seed=2), 6))


@pytest.mark.parametrize("token", [-1, 512, 2**31 - 1])
def test_a_token_outside_the_vocabulary_fails_only_its_own_job(engine: Engine, token: int) -> None:
    slots = [prefill_slot(0, prompt(40, seed=1)), prefill_slot(1, [*prompt(30, seed=2), token, 5])]
    errors = generate(engine, slots, 5)
    assert errors.keys() == {1}
    assert errors[1].code == ErrorCode.INVALID_TOKEN
    assert str(token) in errors[1].message
    assert_equal_output(slots[0], generate_alone(engine, prompt(40, seed=1), 5))


@pytest.mark.interpreted  # it sets an attribute of the engine
def test_only_the_job_that_llama_cpp_cannot_decode_fails(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [prompt(n, seed=n) for n in (60, 50, 90)]
    slots = [prefill_slot(index, tokens) for index, tokens in enumerate(prompts)]
    while not all(slot.state is SlotState.DECODE for slot in slots[:2]):
        assert not run_tick(engine, slots)
    with monkeypatch.context() as patch:
        statuses = fail_decodes_with(engine, 1, patch)
        errors = generate(engine, slots, 12)
        llama_cpp.llama_set_abort_callback(engine.context.pointer, llama_cpp.ggml_abort_callback(), ctypes.c_void_p())
    assert errors.keys() == {1}
    assert errors[1].code == ErrorCode.DECODE_FAILED
    assert statuses.count(2) == 2
    for slot in (slots[0], slots[2]):
        assert_equal_output(slot, generate_alone(engine, prompts[slot.index], 12))


def test_a_sequence_that_lost_its_cells_is_prefilled_again(engine: Engine) -> None:
    slots = [prefill_slot(0, prompt(60, seed=1)), prefill_slot(1, prompt(50, seed=2))]
    while not all(generated(slot) for slot in slots):
        assert not run_tick(engine, slots)
    slots[1].active.n_past = 0
    slots[1].state = SlotState.PREFILL
    engine.sequences.remove(1)
    assert not generate(engine, slots, 10)
    assert_equal_output(slots[1], generate_alone(engine, prompt(50, seed=2), 10))


def test_a_job_that_takes_over_the_sequence_of_a_job_that_is_decoded_alone_is_decoded_with_the_others(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = [prefill_slot(index, prompt(20, seed=index)) for index in range(2)]
    while not all(slot.state is SlotState.DECODE for slot in slots):
        assert not run_tick(engine, slots)
    decode, sizes = engine.context.decode, []

    def decode_and_record() -> int:
        sizes.append(len(engine.context.batch))
        return decode()

    monkeypatch.setattr(engine.context, "decode", decode_and_record)
    isolated = slots[0].active
    engine.sequences.isolated[isolated.seq_id] = isolated
    assert not run_tick(engine, slots)
    assert sizes == [1, 1]
    slots[0].run = Run(isolated.job, isolated.seq_id, isolated.tokens, isolated.n_past)
    assert not run_tick(engine, slots)
    assert sizes == [1, 1, 2]


def test_without_room_for_all_parts_those_that_fit_continue_and_the_others_may_be_decoded_later(
    chat_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(Model(chat_model, ModelOptions(n_gpu_layers=0)), ContextOptions(256, 128, 32, 3, 1, 1))
    slots = [prefill_slot(0, prompt(200, seed=1)), prefill_slot(1, prompt(100, seed=2))]
    while slots[0].state is not SlotState.DECODE:
        assert not run_tick(engine, slots[:1])
    while slots[1].active.n_past < 2 * CHUNK:
        run_tick(engine, slots)
    batch = plan_batch(slots, engine.context.n_batch)
    results = {result.slot.index: result for result in engine.run(batch)}
    assert (results[0].no_room, results[0].error, len(results[0].sampled)) == (False, None, 1)
    assert (results[1].no_room, results[1].error, results[1].n_past) == (True, None, 2 * CHUNK)
    assert "decode_failed" not in caplog.text
    engine.sequences.remove(0)
    assert not generate(engine, slots[1:], 5)
    assert_equal_output(slots[1], generate_alone(engine, prompt(100, seed=2), 5))
    engine.close()
