from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llamaq.common.errors import EngineError, InvalidSettings, ModelError
from llamaq.tools.random_gguf import PLAIN, SLIDING, write_model
from llamaq.worker.process.draft_model_parts import find_draft_model, load_draft_model
from llamaq.worker.process.generation_parts import load_engine
from llamaq.worker.process.speculation_factory import MAX_DRAFT_TOKENS_OF_TICK, make_speculation, n_draft_tokens
from llamaq.worker.scheduling.tokens_ahead.draft_model_speculation import DraftModelSpeculation
from llamaq.worker.settings import WorkerSettings, load_settings


def settings_of(model: Path, **values: Any) -> WorkerSettings:
    sizes: dict[str, Any] = {"n_ctx": 512, "n_batch": 64, "n_ubatch": 64, "n_threads": 1, "warmup": False}
    return load_settings(model=str(model), **sizes, **values)


@pytest.mark.parametrize("values", [{}, {"swa_full": False}, {"kv_unified": False}])
def test_a_worker_that_cannot_remove_the_cells_of_drafts_refuses_speculation(
    any_model: Path, values: dict[str, object]
) -> None:
    kind = any_model.stem
    settings = settings_of(any_model, speculation="ngram", **values)
    engine = load_engine(any_model, settings)
    assert make_speculation(settings_of(any_model, **values), engine) is None
    if kind in {"recurrent", "hybrid"} or (kind == "sliding" and values):
        with pytest.raises(InvalidSettings, match=r"--speculation .* Use --speculation off"):
            make_speculation(settings, engine)
    else:
        assert make_speculation(settings, engine) is not None
    engine.close()


@pytest.mark.starts_processes  # it loads models
def test_the_refusal_of_speculation_names_the_slots_and_the_batch_that_a_sliding_window_needs(tmp_path: Path) -> None:
    model = write_model(tmp_path / "sliding.gguf", SLIDING)
    for n_parallel, n_batch, is_possible in ((4, 8, False), (4, 9, True), (128, 512, False), (127, 512, True)):
        settings = WorkerSettings(
            speculation="ngram", n_parallel=n_parallel, n_batch=n_batch, n_ctx=512, n_threads=1, warmup=False
        )
        engine = load_engine(model, settings)
        if is_possible:
            assert make_speculation(settings, engine) is not None
        else:
            with pytest.raises(InvalidSettings, match=r"--n-parallel of at most 127, and --n-batch above twice"):
                make_speculation(settings, engine)
        engine.close()


def test_a_model_that_has_no_kv_memory_does_not_generate_text(bert_model: Path) -> None:
    with pytest.raises(EngineError, match=r"--model .*\(bert .*--embeddings"):
        load_engine(bert_model, settings_of(bert_model))


def test_the_context_has_logits_for_the_slots_and_the_drafts_of_a_tick() -> None:
    assert n_draft_tokens(WorkerSettings()) == 0
    assert n_draft_tokens(WorkerSettings(speculation="ngram", n_parallel=2, draft_max=5)) == 10
    assert n_draft_tokens(WorkerSettings(speculation="ngram", n_parallel=32)) == MAX_DRAFT_TOKENS_OF_TICK


def test_a_draft_model_follows_the_slots_and_the_cells_of_the_worker(
    any_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = write_model(tmp_path / "target.gguf", PLAIN)
    settings = settings_of(target, speculation="model", model_draft=str(any_model), n_threads_draft=1)
    engine = load_engine(target, settings)
    kind = any_model.stem
    if kind in {"recurrent", "hybrid"}:
        with pytest.raises(InvalidSettings, match=r"--model-draft .* recurrent layers.* --speculation ngram"):
            load_draft_model(any_model, settings, engine)
    else:
        draft_model = load_draft_model(any_model, settings, engine)
        assert draft_model.context.n_ctx == engine.context.n_ctx
        assert draft_model.sequences.n_sequences >= settings.n_parallel
        assert draft_model.context.n_batch == 64
        assert isinstance(make_speculation(settings, engine, draft_model), DraftModelSpeculation)
        draft_model.close()
    assert find_draft_model(settings_of(target)) is None
    engine.close()


def test_a_draft_model_of_another_family_is_refused(demo_model: Path, chat_model: Path) -> None:
    settings = settings_of(demo_model, speculation="model", model_draft=str(chat_model))
    engine = load_engine(demo_model, settings)
    with pytest.raises(ModelError, match=r"--model-draft: .*--speculation ngram"):
        load_draft_model(chat_model, settings, engine)
    with pytest.raises(ModelError, match="--model-draft: there is no file"):
        find_draft_model(settings_of(demo_model, speculation="model", model_draft="none.gguf"))
    engine.close()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"speculation": "model"}, r"--speculation .*--model-draft"),
        ({"model_draft": "small.gguf"}, r"--model-draft .*--speculation model"),
        ({"model_draft": "small.gguf", "speculation": "ngram"}, r"--model-draft .*--speculation is ngram"),
        (
            {"model_draft": "s.gguf", "speculation": "model", "cache_type_v_draft": "q8_0", "flash_attn": "off"},
            "--cache-type-v-draft",
        ),
    ],
)
def test_settings_of_the_draft_model_that_do_not_fit_together_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettings, match=message):
        load_settings(**values)


def test_a_worker_for_embeddings_refuses_speculation() -> None:
    with pytest.raises(InvalidSettings, match="--speculation"):
        load_settings(embeddings=True, speculation="ngram")
