from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llamaq.common.errors import InvalidSettings
from llamaq.worker.process.generation_parts import (
    MAX_DRAFT_TOKENS_OF_TICK,
    load_engine,
    make_speculation,
    n_draft_tokens,
)
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


def test_the_context_has_logits_for_the_slots_and_the_drafts_of_a_tick() -> None:
    assert n_draft_tokens(WorkerSettings()) == 0
    assert n_draft_tokens(WorkerSettings(speculation="ngram", n_parallel=2, draft_max=5)) == 10
    assert n_draft_tokens(WorkerSettings(speculation="ngram", n_parallel=32)) == MAX_DRAFT_TOKENS_OF_TICK


def test_a_worker_for_embeddings_refuses_speculation() -> None:
    with pytest.raises(InvalidSettings, match="--speculation"):
        load_settings(embeddings=True, speculation="ngram")
