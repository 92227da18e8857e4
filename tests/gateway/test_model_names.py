"""A `model` names a queue, a model or an adapter, in this order."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.worker_cards import make_card

from llamaq.common.protocol.embedding_task import JobKind
from llamaq.common.protocol.queue_and_worker_state import CacheSnapshot, LoraScale, Worker
from llamaq.gateway.model_names import NamedModel, Served, adapters_of, find_named

STYLE, TERMS, OFF = (
    LoraScale(name=f"{name}.gguf", scale=scale) for name, scale in (("style", 0.5), ("terms", 1), ("off", 0))
)


def worker_of(queue: str, *adapters: LoraScale, **card: Any) -> Worker:
    cache = CacheSnapshot(n_cells=512, reserved_cells=0)
    return Worker(card=make_card(queue=queue, lora=adapters, **card), cache=cache, heartbeat_ms=1, tick_age_ms=0)


SERVED: Served = {
    "idle": (),
    "law": (worker_of("law", TERMS, OFF, model="base"), worker_of("law", TERMS, STYLE, model="base")),
    "prose": (worker_of("prose", STYLE, LoraScale(name="law.gguf", scale=1), LoraScale(name="base", scale=1)),),
    "texts": (worker_of("texts", LoraScale(name="query.gguf", scale=1), kind=JobKind.EMBEDDING),),
}


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (None, NamedModel("own")),
        ("own", NamedModel("own")),
        ("idle", NamedModel("idle")),
        ("prose", NamedModel("prose")),
        ("base", NamedModel("law")),
        ("law", NamedModel("law")),
        ("terms", NamedModel("law", TERMS)),
        ("terms.gguf", NamedModel("law", TERMS)),
        ("style", NamedModel("law", STYLE)),
        ("law.gguf", NamedModel("prose", LoraScale(name="law.gguf", scale=1))),
        ("query", None),
        ("nothing", None),
        ("", None),
    ],
)
def test_what_a_model_names(model: str | None, named: NamedModel | None) -> None:
    assert find_named(model, "own", SERVED) == named


def test_a_named_adapter_is_used_alone_with_its_scale_or_with_1() -> None:
    assert NamedModel("law").job_options == {}
    assert NamedModel("law", STYLE).job_options == {"lora": {"style.gguf": 0.5}}
    assert NamedModel("law", OFF).job_options == {"lora": {"off.gguf": 1.0}}


def test_adapters_of_several_workers_are_listed_once() -> None:
    assert adapters_of(SERVED["law"]) == [TERMS, OFF, STYLE]
    assert adapters_of(SERVED["texts"]) == []
    assert adapters_of(()) == []
