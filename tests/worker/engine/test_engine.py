from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest

from llamaq.common.errors import EngineError, ErrorCode, JobRejected, ModelError
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.core.batch import Batch, DecodeToken, PrefillChunk
from llamaq.worker.core.draft import Draft
from llamaq.worker.core.job_parts import BEST, RowDraw
from llamaq.worker.core.slot import Run, Slot, SlotState
from llamaq.worker.engine import abi_check
from llamaq.worker.engine.engine import Engine, LogitRows, RowDrawer
from llamaq.worker.engine.llama_bindings import NO_ROOM, Context, Model
from llamaq.worker.engine.load_options import ContextOptions, ModelOptions
from llamaq.worker.generation.sampling.logit_sampler import LogitSampler
from llamaq.worker.generation.sampling.uniform_numbers import UniformNumbers
from llamaq.worker.testing import make_job

OPTIONS = ContextOptions(n_ctx=1024, n_batch=128, n_ubatch=32, n_seq_max=8, n_threads=1, n_threads_batch=1)
CHUNK = 23
NOISE = 0.05
"""Upper bound on how much the shape of a batch changes logits, as a share of their standard deviation."""


class Greedy:
    """Samples the token with the largest logit, and records the gap to the second largest.

    The gaps are in standard deviations of the logits.
    """

    logprobs = draw_probability = None
    checks_logits = False

    def __init__(self) -> None:
        self.gaps: list[float] = []

    def sample(
        self, logits: npt.NDArray[np.float32], history: Sequence[int], n_prompt: int, drawn: int | None = None
    ) -> int:
        assert not logits[:0].flags.owndata
        second, first = np.partition(logits, -2)[-2:]
        self.gaps.append(float((first - second) / logits.std()))
        return int(logits.argmax())

    def close(self) -> None:
        pass


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


def prefill_slot(index: int, prompt: Sequence[int], sampler: Greedy | None = None) -> Slot:
    """Return a slot in PREFILL whose sequence has the id `index`."""
    job = make_job(prompt, sampler=sampler or Greedy())  # type: ignore[arg-type]
    return Slot(index, SlotState.PREFILL, Run(job, index, list(prompt)))


def prompt(n: int, seed: int, n_vocab: int = 500) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, n_vocab, n).tolist()
    return tokens


def plan_batch(slots: Iterable[Slot], budget: int) -> Batch:
    """Return a batch of at most `budget` tokens: all decode tokens, then prefill chunks."""
    slots = list(slots)
    decode = tuple(DecodeToken(slot) for slot in slots if slot.state is SlotState.DECODE)
    chunks, n_left = [], budget - len(decode)
    for slot in slots:
        if slot.state is SlotState.PREFILL and n_left:
            chunks.append(PrefillChunk(slot, min(n_left, CHUNK, slot.n_pending)))
            n_left -= chunks[-1].n_tokens
    return Batch(decode, tuple(chunks))


def run_tick(engine: Engine, slots: Iterable[Slot]) -> dict[int, JobRejected]:
    """Run one batch of all slots, and return the errors by slot index."""
    errors = {}
    for result in engine.run(plan_batch(slots, engine.context.n_batch)):
        run = result.slot.active
        run.n_past = result.n_past
        if result.error is not None:
            errors[result.slot.index] = result.error
        elif result.sampled:
            run.tokens += [sampled.token for sampled in result.sampled]
            result.slot.state = SlotState.DECODE
        elif run.n_pending > 1:
            result.slot.state = SlotState.PREFILL
    return errors


def generated(slot: Slot) -> list[int]:
    return slot.active.tokens[slot.active.n_prompt :]


def generate(engine: Engine, slots: Sequence[Slot], n: int) -> dict[int, JobRejected]:
    """Run until every slot has `n` tokens or an error. Then remove the sequences, and return the errors."""
    errors: dict[int, JobRejected] = {}
    for _ in range(50 * n):
        waiting = [slot for slot in slots if slot.index not in errors and len(generated(slot)) < n]
        if not waiting:
            break
        errors |= run_tick(engine, waiting)
    else:
        raise AssertionError("no progress")
    for slot in slots:
        engine.sequences.remove(slot.active.seq_id)
    return errors


def assert_equal_output(slot: Slot, expected_slot: Slot) -> None:
    """Assert that two slots have the same tokens up to the first difference where the gap was below `NOISE`."""
    gaps = expected_slot.active.job.sampler.gaps  # type: ignore[attr-defined]
    for index, (token, expected) in enumerate(zip(generated(slot), generated(expected_slot), strict=True)):
        if token != expected:
            assert gaps[index] < NOISE, f"token {index} differs with a gap of {gaps[index]:.3f}"
            break


def generate_alone(engine: Engine, tokens: Sequence[int], n: int) -> Slot:
    slot = prefill_slot(0, tokens)
    assert not generate(engine, [slot], n)
    return slot


@pytest.fixture
def engine(any_model: Path) -> Iterator[Engine]:
    engine = Engine(Model(any_model, ModelOptions(n_gpu_layers=0)), OPTIONS)
    yield engine
    engine.close()


@pytest.fixture
def demo(demo_model: Path) -> Iterator[Engine]:
    engine = Engine(Model(demo_model, ModelOptions(n_gpu_layers=0)), OPTIONS)
    yield engine
    engine.close()


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


def test_the_output_in_a_batch_equals_the_output_alone(engine: Engine) -> None:
    prompts = [prompt(n, seed=n) for n in (5, 70, 33, 100)]
    together = [prefill_slot(index, tokens) for index, tokens in enumerate(prompts)]
    assert not generate(engine, together, 20)
    for slot, tokens in zip(together, prompts, strict=True):
        assert_equal_output(slot, generate_alone(engine, tokens, 20))


def test_the_demo_model_generates_the_same_in_a_batch_and_alone(demo: Engine) -> None:
    texts = ["Once upon a time", "The cat sat on", "<|user|>What colour is the sky?<|end|><|assistant|>"]
    prompts = [demo.vocab.encode(text) for text in texts]
    together = [prefill_slot(index, tokens) for index, tokens in enumerate(prompts)]
    assert not generate(demo, together, 24)
    for slot, tokens in zip(together, prompts, strict=True):
        assert_equal_output(slot, generate_alone(demo, tokens, 24))
    assert demo.vocab.decode(generated(together[0])).isprintable()


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


class Best(Greedy):
    """Samples the token that the engine names as the best, and records what it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.expected: list[int] = []

    def sample(
        self, logits: npt.NDArray[np.float32], history: Sequence[int], n_prompt: int, drawn: int | None = None
    ) -> int:
        self.expected.append(int(logits.argmax()))
        assert drawn is not None
        return drawn


def test_a_sampler_gets_the_token_with_the_largest_logit(engine: Engine) -> None:
    sampler = Best()
    slot = prefill_slot(0, prompt(9, seed=1), sampler)
    assert generate(engine, [slot], 6) == {}
    assert generated(slot)[:6] == sampler.expected[:6]


class RecordingDrawer:
    """Draws token 77 of each row, and records the draws."""

    def __init__(self) -> None:
        self.draws: list[tuple[RowDraw | None, ...]] = []

    def draw(self, rows: LogitRows, draws: Sequence[RowDraw | None]) -> list[int | None]:
        assert len(rows) == len(draws)
        self.draws.append(tuple(draws))
        return [None if draw is None else 77 for draw in draws]


def test_a_row_drawer_draws_for_the_samplers_that_need_the_logits_alone(demo_model: Path) -> None:
    def samplers() -> list[Any]:
        plain = LogitSampler(SamplingDefaults(top_k=7, temperature=0.5), seed=1, masked_tokens=[9, 3])
        penalties = LogitSampler(SamplingDefaults(repeat_penalty=1.1), seed=2)
        return [plain, penalties, LogitSampler(SamplingDefaults(), seed=3, n_logprobs=2), Best()]

    def generate_all(row_drawer: RowDrawer | None) -> list[list[int]]:
        engine = Engine(Model(demo_model, ModelOptions(n_gpu_layers=0)), OPTIONS, row_drawer=row_drawer)
        slots = [prefill_slot(index, prompt(9, seed=index), sampler) for index, sampler in enumerate(samplers())]
        assert generate(engine, slots, 3) == {}
        engine.close()
        return [generated(slot)[:3] for slot in slots]

    drawer = RecordingDrawer()
    alone, drawn = generate_all(None), generate_all(drawer)
    uniforms = UniformNumbers(1)
    assert drawer.draws == [
        (RowDraw(7, 0.95, 0.05, 0, 0.5, (3, 9), uniforms.at(position)), None, None, BEST) for position in (1, 2)
    ]
    assert drawn == [[alone[0][0], 77, 77], alone[1], alone[2], [alone[3][0], 77, 77]]


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


def test_a_copied_prefix_gives_the_same_output_as_the_whole_prompt(engine: Engine) -> None:
    prefix, rest = prompt(60, seed=1), prompt(20, seed=2)
    source = prefill_slot(5, prefix)
    while not generated(source):
        assert not run_tick(engine, [source])
    assert engine.sequences.copy(5, 1, len(prefix)) == len(prefix)
    slot = prefill_slot(1, [*prefix, *rest])
    slot.active.n_past = len(prefix)
    assert not generate(engine, [slot], 12)
    assert_equal_output(slot, generate_alone(engine, [*prefix, *rest], 12))
    assert engine.context.last_position(5) == len(prefix) - 1


def test_a_part_of_a_sequence_is_copied_only_if_the_memory_can_be_cut(engine: Engine) -> None:
    source = prefill_slot(5, prompt(60, seed=1))
    while not generated(source):
        assert not run_tick(engine, [source])
    expected = 0 if engine.model.is_recurrent else 30
    assert engine.sequences.copy(5, 1, 30) == expected
    assert engine.context.last_position(1) == expected - 1
    assert engine.sequences.cut(5, 40) == (0 if engine.model.is_recurrent else 40)
    assert engine.sequences.copy(5, 2, 0) == 0
    assert engine.sequences.copy(6, 2, 10) == 0


def test_an_empty_sequence_may_be_removed(engine: Engine) -> None:
    engine.sequences.remove(3)
    assert engine.context.last_position(3) == -1


def test_the_engine_has_the_limits_of_its_model_and_context(demo: Engine) -> None:
    assert (demo.context.n_ctx, demo.context.n_batch, demo.context.n_seq_max) == (1024, 128, 8)
    assert demo.context.n_vocab == demo.vocab.n_tokens
    assert demo.model.n_ctx_train >= 1024
    assert demo.model.quantization in repr(demo)
    assert repr(demo).endswith("n_ctx=1024 n_batch=128 seqs=8>")
    demo.close()
    demo.close()


def test_a_file_that_is_not_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model file"):
        Model(tmp_path / "missing.gguf", ModelOptions(n_gpu_layers=0))
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(ModelError, match="cannot load"):
        Model(tmp_path / "text.gguf", ModelOptions(n_gpu_layers=0))


@pytest.mark.parametrize("n_seq_max", [0, 65, 257])
def test_more_sequences_than_llama_cpp_allows_are_refused(chat_model: Path, n_seq_max: int) -> None:
    model = Model(chat_model, ModelOptions(n_gpu_layers=0))
    with pytest.raises(EngineError, match="sequences"):
        Context(model, ContextOptions(512, 64, 64, n_seq_max, 1, 1))
    model.close()


def test_the_log_of_llama_cpp_is_written_to_logging(chat_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "llamaq.worker.engine.llama_log"):
        Model(chat_model, ModelOptions(n_gpu_layers=0)).close()
    assert any("file format = GGUF V3" in record.getMessage() for record in caplog.records)
    assert not any("\n" in record.getMessage() for record in caplog.records)


def test_loading_a_model_writes_nothing_to_stderr(chat_model: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from llamaq.worker.engine.engine import Engine;"
        "from llamaq.worker.engine.llama_bindings import Model;"
        "from llamaq.worker.engine.load_options import ContextOptions, ModelOptions;"
        "Engine(Model(Path(sys.argv[1]), ModelOptions(n_gpu_layers=0)), ContextOptions(4096, 64, 64, 2, 1, 1)).close()"
    )
    done = subprocess.run([sys.executable, "-c", code, chat_model], capture_output=True, timeout=60, check=True)
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda patch: patch.setattr(llama_cpp, "__version__", "0.2.90"), "llamaq needs >=0.3.36"),
        (lambda patch: patch.setitem(abi_check._SIZES, "llama_batch", 64), "llama_batch has 56 bytes, not 64"),
        (lambda patch: patch.setitem(abi_check._CONTEXT_DEFAULTS, "n_batch", 512), "n_batch is 2048 by default"),
    ],
    ids=["version", "size", "default"],
)
def test_an_unsupported_llama_cpp_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None], message: str
) -> None:
    abi_check.check_abi.cache_clear()
    change(monkeypatch)
    with pytest.raises(EngineError, match=message):
        abi_check.check_abi()


def decode_with_draft(engine: Engine, slot: Slot, draft: Sequence[int], *others: PrefillChunk) -> int:
    """Run one tick as the scheduler does. Returns the number of accepted draft tokens."""
    run = slot.active
    n_before = len(run.tokens)
    results = engine.run(Batch((DecodeToken(slot, Draft(tuple(draft))),), others))
    for result in results:
        if result.slot is not slot:
            result.slot.active.n_past = result.n_past
            continue
        assert len(run.tokens) == n_before, "the engine leaves the history as it was"
        tokens = [sampled.token for sampled in result.sampled]
        assert tokens[:-1] == list(draft[: len(tokens) - 1])
        run.tokens += tokens
        run.n_past = n_before + len(tokens) - 1
        if result.n_past > n_before:
            assert result.n_past == n_before + len(draft)
            assert engine.sequences.cut(run.seq_id, run.n_past) == run.n_past
        assert engine.sequences.holds(run.seq_id, run.n_past)
    return len(run.tokens) - n_before - 1


def test_a_draft_changes_no_token_and_leaves_no_cell_beside_a_prompt(any_model: Path) -> None:
    options = replace(OPTIONS, n_logits=32)
    engine = Engine(Model(any_model, ModelOptions(n_gpu_layers=0)), options)
    assert engine.sequences.can_remove_draft is engine.sequences.can_cut
    if engine.sequences.can_remove_draft:
        expected = generate_alone(engine, prompt(100, seed=1), 60)
        slot, other = prefill_slot(0, prompt(100, seed=1)), prefill_slot(1, prompt(300, seed=2))
        while slot.state is not SlotState.DECODE:
            run_tick(engine, [slot])
        n_accepted: list[int] = []
        while len(generated(slot)) < 60:
            n = len(generated(slot))
            draft = generated(expected)[n : n + 6] or [1]
            if (wrong_at := (None, 3, 0)[len(n_accepted) % 3]) is not None:
                draft[wrong_at:] = [7] * len(draft[wrong_at:])
            n_accepted.append(decode_with_draft(engine, slot, draft, PrefillChunk(other, min(9, other.n_pending - 1))))
        del slot.active.tokens[160:]
        assert {0, 3, 6} <= {*n_accepted}
        assert_equal_output(slot, expected)
        for each in (slot, other):
            engine.sequences.remove(each.active.seq_id)
    engine.close()


def test_a_batch_without_room_is_computed_without_its_drafts(demo: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = [prefill_slot(index, demo.vocab.encode(text)) for index, text in enumerate(["Once upon", "The sun was"])]
    while any(slot.state is not SlotState.DECODE for slot in slots):
        run_tick(demo, slots)
    decode, statuses = demo.context.decode, [NO_ROOM]
    monkeypatch.setattr(demo.context, "decode", lambda: statuses.pop() if statuses else decode())
    before = [slot.active.n_past for slot in slots]
    results = demo.run(Batch(tuple(DecodeToken(slot, Draft((1, 2))) for slot in slots)))
    assert [result.n_past for result in results] == [n_past + 1 for n_past in before]
    assert [len(result.sampled) for result in results] == [1, 1]


def test_a_sequence_that_is_decoded_alone_needs_no_room_for_its_forced_tokens(
    demo: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = prefill_slot(0, demo.vocab.encode("Once upon"))
    while slot.state is not SlotState.DECODE:
        run_tick(demo, [slot])
    n_before = slot.active.n_past
    demo.sequences.isolated.add(slot.active.seq_id)
    decode, statuses = demo.context.decode, [NO_ROOM]
    monkeypatch.setattr(demo.context, "decode", lambda: statuses.pop() if statuses else decode())
    [result] = demo.run(Batch((DecodeToken(slot, forced=(1, 2, 3)),)))
    assert not result.no_room
    assert (result.n_past, len(result.sampled)) == (n_before + 1, 1)
    slot.active.n_past = result.n_past
    statuses += [NO_ROOM, NO_ROOM]
    slot.active.tokens.append(result.sampled[0].token)
    [result] = demo.run(Batch((DecodeToken(slot, forced=(1, 2, 3)),)))
    assert (result.no_room, result.n_past) == (True, n_before + 1)
    demo.sequences.remove(slot.active.seq_id)


def test_forced_tokens_are_computed_like_a_prompt_and_the_next_token_is_sampled(any_model: Path) -> None:
    engine = Engine(Model(any_model, ModelOptions(n_gpu_layers=0)), OPTIONS)
    expected = generate_alone(engine, prompt(100, seed=1), 30)
    slot, other = prefill_slot(0, prompt(100, seed=1)), prefill_slot(1, prompt(300, seed=2))
    while slot.state is not SlotState.DECODE:
        run_tick(engine, [slot])
    while len(generated(slot)) < 30:
        run, n = slot.active, len(generated(slot))
        forced = tuple(generated(expected)[n : n + n % 5])
        chunk = PrefillChunk(other, min(9, other.n_pending - 1))
        results = {one.slot: one for one in engine.run(Batch((DecodeToken(slot, forced=forced),), (chunk,)))}
        result, other.active.n_past = results[slot], results[other].n_past
        assert tuple(one.token for one in result.sampled[:-1]) == forced
        assert result.n_past == run.n_past + 1 + len(forced)
        assert engine.sequences.holds(run.seq_id, result.n_past)
        run.n_past = result.n_past
        run.tokens += [one.token for one in result.sampled]
    del slot.active.tokens[130:]
    assert_equal_output(slot, expected)
    for each in (slot, other):
        engine.sequences.remove(each.active.seq_id)
    engine.close()
