"""What `Engine` computes for a batch is what it computes for each job alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.support.engine_ticks import (
    OPTIONS,
    Greedy,
    assert_equal_output,
    generate,
    generate_alone,
    generated,
    prefill_slot,
    prompt,
    run_tick,
)

from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.core.job_parts import BEST, RowDraw
from llamaq.worker.engine.engine import Engine, LogitRows, RowDrawer
from llamaq.worker.engine.llama_bindings import Model
from llamaq.worker.engine.load_options import ModelOptions
from llamaq.worker.generation.sampling.logit_sampler import LogitSampler
from llamaq.worker.generation.sampling.uniform_numbers import UniformNumbers


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
