"""The draft model with llama.cpp: it drafts what it would generate by itself, for all slots in the same batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from llamaq.tools.random_gguf import MEMORY_KINDS, write_model
from llamaq.worker.core.batch import Batch, DecodeToken
from llamaq.worker.core.draft_plan import DraftPart, DraftPlan
from llamaq.worker.core.slot import Run, Slot, SlotState
from llamaq.worker.engine.draft_model import DraftModel
from llamaq.worker.engine.llama_bindings import Context, Model
from llamaq.worker.engine.load_options import ContextOptions, ModelOptions
from llamaq.worker.testing import make_job

N_SLOTS = 3
N_VOCAB = 512


def options(model: Model) -> ContextOptions:
    n_seq_max = 2 * N_SLOTS + 1 if model.n_swa else N_SLOTS
    return ContextOptions(512, 128, 64, n_seq_max, 1, 1, has_scratch_sequence=bool(model.n_swa))


@pytest.fixture(scope="module", params=["plain", "sliding"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A model of each kind of memory that a draft model may have."""
    kind: str = request.param
    path = write_model(tmp_path_factory.mktemp("drafts") / f"{kind}.gguf", MEMORY_KINDS[kind], seed=3)
    model = Model(path, ModelOptions(n_gpu_layers=0))
    yield model
    model.close()


def make_draft_model(
    model: Model, n_vocab: int = N_VOCAB, p_min: float = 0.0, ends: frozenset[int] = frozenset()
) -> DraftModel:
    return DraftModel(model, options(model), n_vocab=n_vocab, end_tokens=ends, p_min=p_min)


def make_slot(index: int, history: list[int], stop_token_ids: Sequence[int] = ()) -> Slot:
    job = make_job(history, stop_token_ids=stop_token_ids)
    return Slot(index, SlotState.DECODE, Run(job, index, list(history), len(history) - 1))


def batch_of(*parts: DraftPart) -> Batch:
    return Batch(tuple(DecodeToken(part.slot) for part in parts), draft_plan=DraftPlan(parts))


def greedy(model: Model, history: list[int], n_tokens: int) -> tuple[int, ...]:
    """Return the most probable tokens after the history, each computed from the whole text."""
    context = Context(model, options(model))
    tokens: list[int] = []
    for _ in range(n_tokens):
        context.clear()
        context.batch.clear()
        context.batch.add_chunk([*history, *tokens], 0, 0, has_row=True)
        context.decode()
        tokens.append(int(context.logits(1)[0].argmax()))
    context.close()
    return tuple(tokens)


def test_drafts_follow_histories_that_grow_that_differ_from_the_draft_and_that_are_long(model: Model) -> None:
    draft_model = make_draft_model(model)
    first, second = make_slot(0, [20, 30, 40, 50]), make_slot(2, [*range(60, 160)])
    batch = draft_model.add_drafts(batch_of(DraftPart(second, 0, 50, 0), DraftPart(first, 0, 4, 5)))
    drafts = [part.draft.tokens for part in batch.decode]
    assert drafts == [(), greedy(model, first.active.tokens, 5)]
    assert (batch.draft_work.n_before_steps, batch.draft_work.n_steps) == (53, 5)

    first.active.tokens += [*drafts[1][:2], 99]
    batch = draft_model.add_drafts(batch_of(DraftPart(first, 6, 1, 3), DraftPart(second, 50, 50, 6)))
    assert [part.draft.tokens for part in batch.decode] == [
        greedy(model, first.active.tokens, 3),
        greedy(model, second.active.tokens, 6),
    ]
    assert batch.draft_work.n_steps == 6
    assert not batch.draft_work.lost

    second.active.tokens += batch.decode[1].draft.tokens  # all were accepted, so the last one was not computed
    batch = draft_model.add_drafts(batch_of(DraftPart(second, 105, 1, 2)))
    assert batch.decode[0].draft.tokens == greedy(model, second.active.tokens, 2)
    draft_model.context.close()


def test_a_draft_ends_before_an_end_token_an_unknown_token_and_an_improbable_one(model: Model) -> None:
    slot = make_slot(1, [20, 30, 40, 50])
    tokens = greedy(model, slot.active.tokens, 4)
    plan = batch_of(DraftPart(slot, 0, 4, 4))
    for draft_model, expected, stopped_early in (
        (make_draft_model(model, ends=frozenset({tokens[2]})), tokens[: tokens.index(tokens[2])], False),
        (make_draft_model(model, n_vocab=tokens[0]), (), True),
        (make_draft_model(model, p_min=1e-6), tokens, False),
        (make_draft_model(model, p_min=1.0), (), True),
    ):
        draft = draft_model.add_drafts(plan).decode[0].draft
        assert (draft.tokens, draft.stopped_early) == (expected, stopped_early)
        draft_model.context.close()


def test_a_draft_ends_before_a_stop_token_of_its_job(model: Model) -> None:
    history = [20, 30, 40, 50]
    tokens = greedy(model, history, 4)
    draft_model = make_draft_model(model)
    slot = make_slot(1, history, stop_token_ids=[tokens[2]])
    draft = draft_model.add_drafts(batch_of(DraftPart(slot, 0, 4, 4))).decode[0].draft
    assert draft.tokens == tokens[: tokens.index(tokens[2])]
    draft_model.context.close()


def test_a_sequence_without_the_planned_tokens_is_reported_and_gets_no_draft(model: Model) -> None:
    draft_model = make_draft_model(model)
    batch = draft_model.add_drafts(
        batch_of(DraftPart(make_slot(0, [20, 30, 40]), 2, 1, 4), DraftPart(make_slot(1, [20, 30, 40]), 0, 3, 4))
    )
    assert batch.draft_work.lost == {0}
    assert [len(part.draft) for part in batch.decode] == [0, 4]
    draft_model.context.close()


@pytest.mark.parametrize("status", [1, 2, -3])
def test_after_a_failed_decode_nothing_is_drafted(
    chat_model: Path, status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    draft_model = make_draft_model(Model(chat_model, ModelOptions(n_gpu_layers=0)))
    plan = batch_of(DraftPart(make_slot(0, [20, 30, 40]), 0, 3, 4))
    with monkeypatch.context() as patch:
        patch.setattr(draft_model.context, "decode", lambda: status)
        for _ in range(2):
            batch = draft_model.add_drafts(plan)
            assert batch.draft_work.has_failed
            assert batch.decode == plan.decode
    assert draft_model.add_drafts(plan).draft_work.has_failed, "until the worker is restarted"
    assert caplog.text.count("draft_model.failed") == 1
    assert draft_model.add_drafts(Batch()) == Batch()
    draft_model.close()


def test_a_measurement_leaves_the_sequences_empty(chat_model: Path) -> None:
    draft_model = make_draft_model(Model(chat_model, ModelOptions(n_gpu_layers=0)))
    work = draft_model.measure(N_SLOTS)
    assert work.n_step_drafts == N_SLOTS * work.n_steps > 0
    assert work.steps_s > 0
    assert work.n_before_steps > 0
    assert work.before_steps_s > 0
    assert [draft_model.context.last_position(seq_id) for seq_id in range(N_SLOTS)] == [-1] * N_SLOTS
    draft_model.close()


def test_a_batch_that_is_smaller_than_the_measurement_is_enough(model: Model) -> None:
    small = DraftModel(model, replace(options(model), n_batch=8, n_ubatch=8), n_vocab=N_VOCAB, end_tokens=frozenset())
    assert small.measure(N_SLOTS).n_before_steps == 8
    small.context.close()
